"""A tiny model in many configurations: chunk sizes, prefix hits, preemption; always the same tokens."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from oracle import References, assert_all_same, assert_judged_right, assert_same, judged
from prompt_set import BLOCK_SIZE, random_ids, random_prompts
from served_runtime import Answer, ServedRuntime, serve

from dynrt.runtime import RuntimeConfig

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

CHUNKINGS = (512, 7, BLOCK_SIZE, BLOCK_SIZE + 1)  # tokens a step; all but the first split nearly every prompt
SHORT = ("31 tokens", "32 tokens", "33 tokens", "65 tokens", "100 tokens")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def references(tiny_model_dir: Path) -> References:
    """The answers of one engine that does everything, one prompt at a time."""
    prompts = random_prompts()
    async with serve(config_for(tiny_model_dir, prefill=0)) as aggregated:
        answers = {name: await aggregated.answer(prompt_ids) for name, prompt_ids in prompts.items()}
    return judged(tiny_model_dir, prompts, answers)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=CHUNKINGS)
async def pair(tiny_model_dir: Path, request: pytest.FixtureRequest) -> AsyncIterator[ServedRuntime]:
    async with serve(config_for(tiny_model_dir, max_batch_tokens=request.param)) as served:
        yield served


def config_for(model_dir: Path, **settings: Any) -> RuntimeConfig:
    return RuntimeConfig(model=str(model_dir), dtype="float32", local_prefill="never", **settings)


def prompts_of(references: References, names: tuple[str, ...]) -> dict[str, list[int]]:
    return {name: references[name].prompt_ids for name in names}


async def test_aggregated_is_what_transformers_answers(references: References) -> None:
    for name, reference in references.items():
        assert_judged_right(name, reference)


async def test_all_at_once(pair: ServedRuntime, references: References) -> None:
    answers = await pair.answers(prompts_of(references, tuple(references)), salt="at once")
    assert_all_same(references, answers)


async def test_one_by_one(pair: ServedRuntime, references: References) -> None:
    for name, reference in references.items():
        answer = await pair.answer(reference.prompt_ids, salt="one by one")
        assert_same(name, reference, answer.token_ids)


async def test_where_the_planner_likes(pair: ServedRuntime, references: References) -> None:
    prompts = prompts_of(references, tuple(references))
    assert_all_same(references, await pair.answers(prompts, salt="auto", local_prefill="auto"))


async def test_prefix_hit_on_prefill_only(pair: ServedRuntime, references: References) -> None:
    prompts = prompts_of(references, SHORT)
    await pair.answers(prompts, salt="prefill", max_tokens=1)  # its reservation is given back unfilled
    await pair.settle()
    answers, pushed_blocks = await answers_and_pushed_blocks(pair, prompts, salt="prefill")
    assert_all_same(references, answers)
    assert [answer.cached_tokens for answer in answers.values()] == [0, 0, 32, 64, 96]
    assert pushed_blocks == 1 + 1 + 2 + 3 + 4


async def test_prefix_hit_on_decode_only(pair: ServedRuntime, references: References) -> None:
    prompts = prompts_of(references, SHORT)
    await pair.answers(prompts, salt="decode", local_prefill="always")
    await pair.settle()
    answers, pushed_blocks = await answers_and_pushed_blocks(pair, prompts, salt="decode")
    assert_all_same(references, answers)
    assert [answer.cached_tokens for answer in answers.values()] == [0] * 5
    assert pushed_blocks == 1 + 0 + 1 + 1 + 1  # the last block if it is not full


async def test_prefix_hit_on_both(pair: ServedRuntime, references: References) -> None:
    prompts = prompts_of(references, SHORT)
    await pair.answers(prompts, salt="both")
    await pair.settle()
    answers, pushed_blocks = await answers_and_pushed_blocks(pair, prompts, salt="both")
    assert_all_same(references, answers)
    assert [answer.cached_tokens for answer in answers.values()] == [0, 0, 32, 64, 96]
    assert pushed_blocks == 1 + 0 + 1 + 1 + 1


async def test_longer_hit_on_decode_than_on_prefill(pair: ServedRuntime, references: References) -> None:
    """Of 100 tokens prefill holds 32, decode 64: prefill computes the rest, and sends what lies behind 64."""
    prompt_ids = references["100 tokens"].prompt_ids
    await pair.answer(prompt_ids[:33], salt="longer", max_tokens=1)
    await pair.answer(prompt_ids[:64], salt="longer", max_tokens=2, local_prefill="always")
    await pair.settle()
    answers, pushed_blocks = await answers_and_pushed_blocks(pair, {"100 tokens": prompt_ids}, salt="longer")
    assert_all_same(references, answers)
    assert answers["100 tokens"].cached_tokens == 32
    assert pushed_blocks == 2


async def answers_and_pushed_blocks(
    pair: ServedRuntime, prompts: dict[str, list[int]], salt: str
) -> tuple[dict[str, Answer], float]:
    pushed_before = pair.metric("dynrt_kv_bytes_pushed_total")
    answers = await pair.answers(prompts, salt=salt)
    await pair.settle()
    pushed_bytes = pair.metric("dynrt_kv_bytes_pushed_total") - pushed_before
    return answers, pushed_bytes / (
        4 * 2 * BLOCK_SIZE * 2 * 16 * 4
    )  # layers, K and V, tokens, heads, size, float32


@pytest.mark.parametrize("num_prefill", [0, 1], ids=["aggregated", "disaggregated"])
async def test_preemption(tiny_model_dir: Path, num_prefill: int) -> None:
    """8 requests start in 1 block each and grow to 3; there are 12."""
    rng = random.Random(11)
    prompts = {f"prompt {i}": random_ids(rng, 20 + i) for i in range(8)}
    config = config_for(tiny_model_dir, prefill=num_prefill, kv_blocks=12)
    async with serve(config) as narrow:
        answers = await narrow.answers(prompts)
        assert (await narrow.preemptions())["decode-0"] > 0
    for name, reference in judged(tiny_model_dir, prompts, answers).items():
        assert_judged_right(name, reference)
