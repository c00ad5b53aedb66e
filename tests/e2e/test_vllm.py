"""vLLM engines behind the runtime: the same tokens handed off as here, and nothing left behind by what goes wrong."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live_server import caught, eventually
from oracle import References, assert_all_same, assert_judged_right, judged
from prompt_set import BLOCK_SIZE, random_ids, random_prompts
from served_runtime import Answer, ServedRuntime
from tiny_model import write_tiny_model
from vllm_serving import (
    ANSWER_S,
    LONG,
    MARKS,
    START_S,
    answers_of_decode_alone,
    check_handoffs_at_once,
    check_prefix_hits,
    prompts_of,
    serve_pair,
    warm_prefixes,
)

from dynrt.runtime.messages import Status

pytestmark = [*MARKS, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slow enough to be killed in the middle of a handoff."""
    return write_tiny_model(tmp_path_factory.mktemp("vllm") / "llama", hidden=256, head_size=32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(model_dir: Path) -> AsyncIterator[ServedRuntime]:
    async with serve_pair(model_dir) as pair:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def references(pair: ServedRuntime, model_dir: Path) -> References:
    return await answers_of_decode_alone(pair, model_dir, random_prompts())


async def test_alone_is_what_transformers_answers(references: References) -> None:
    for name, reference in references.items():
        assert_judged_right(name, reference)


async def test_handed_off_all_at_once(pair: ServedRuntime, references: References) -> None:
    await check_handoffs_at_once(pair, references)


async def test_with_prefix_hits_on_both_workers(pair: ServedRuntime, references: References) -> None:
    prompts = await warm_prefixes(pair, references)
    pushed_before = pair.metric("dynrt_kv_bytes_pushed_total")
    await check_prefix_hits(pair, references, prompts)
    block_bytes = 4 * 2 * BLOCK_SIZE * 2 * 32 * 4  # layers, K and V, tokens, KV heads, head size, float32
    pushed = pair.metric("dynrt_kv_bytes_pushed_total") - pushed_before
    assert pushed == len(prompts) * block_bytes, "the block of the last token, and no other"


async def test_where_the_planner_likes(pair: ServedRuntime, references: References) -> None:
    answers = await pair.answers(prompts_of(references), salt="auto", local_prefill="auto")
    assert_all_same(references, answers)


async def test_preempted_on_decode(pair: ServedRuntime, model_dir: Path) -> None:
    """Three requests that need 35 blocks each at their end, in 64 blocks."""
    prompts = {str(seed): random_ids(random.Random(seed), 100) for seed in range(3)}
    preempted_before = (await pair.preemptions())["decode-0"]
    answers = await pair.answers(prompts, max_tokens=1000, salt="preempted")
    assert (await pair.preemptions())["decode-0"] > preempted_before
    for name, reference in judged(model_dir, prompts, answers).items():
        assert_judged_right(name, reference)
    await pair.settle()


async def test_clients_that_leave_in_every_state(pair: ServedRuntime) -> None:
    rng = random.Random(7)
    for _round in range(6):
        salt = secrets.token_hex(4)
        prompts = [random_ids(rng, rng.choice((40, 300, 900))) for _ in range(5)]
        tasks = [asyncio.create_task(pair.answer(ids, salt=salt, max_tokens=40)) for ids in prompts]
        for task in tasks:
            for _ in range(rng.randrange(60)):
                await pair.runtime.status()  # a turn of both engines
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pair.settle()


async def is_pushing(pair: ServedRuntime) -> bool:
    """A handoff is open on both ends, and prefill still computes: its status comes between two steps."""
    statuses = await pair.runtime.status()
    return all(status.open_handoffs for status in statuses.values())


async def decodes(pair: ServedRuntime) -> bool:
    return _of_decode(await pair.runtime.status()).load.running_requests > 0


def _of_decode(statuses: dict[str, Status]) -> Status:
    return statuses["decode-0"]


FAULTS = [
    pytest.param("prefill-0", signal.SIGKILL, LONG, is_pushing, id="prefill killed while it pushes"),
    pytest.param("prefill-0", signal.SIGSTOP, LONG, is_pushing, id="prefill hangs while it pushes"),
    pytest.param("decode-0", signal.SIGKILL, 60, decodes, id="decode killed while it streams"),
]


@pytest.mark.parametrize(("victim", "fault", "num_tokens", "moment"), FAULTS)
async def test_worker_lost(
    pair: ServedRuntime,
    victim: str,
    fault: signal.Signals,
    num_tokens: int,
    moment: Callable[[ServedRuntime], object],
) -> None:
    await eventually(lambda: hands_off(pair), START_S)
    before = pair.runtime.pids()
    prompt_ids = random_ids(random.Random(num_tokens), num_tokens)
    expected = await pair.answer(prompt_ids, salt="expected", max_tokens=100)
    salts: list[str] = []

    def ask() -> Coroutine[Any, Any, Answer]:
        salts.append(secrets.token_hex(4))  # no hits
        return pair.answer(prompt_ids, salt=salts[-1], max_tokens=100)

    answer = await caught(lambda: moment(pair), ask, ANSWER_S)
    os.kill(before[victim], fault)
    assert (await answer).token_ids == expected.token_ids
    await pair.settle()
    await eventually(lambda: is_replaced(pair, before, victim), START_S)
    again = await pair.answer(prompt_ids, salt=salts[-1], max_tokens=100)
    assert again.token_ids == expected.token_ids
    await pair.settle()


async def hands_off(pair: ServedRuntime) -> bool:
    """Both engines are up and connected."""
    committed_before = pair.metric("dynrt_handoffs_total", outcome="committed")
    await pair.answer([5, 6, 7], max_tokens=2)
    return pair.metric("dynrt_handoffs_total", outcome="committed") > committed_before


def is_replaced(pair: ServedRuntime, before: dict[str, int], victim: str) -> bool:
    now = pair.runtime.pids()
    return set(now) == set(before) and now[victim] != before[victim]
