"""vLLM engines with tensor parallel behind the runtime, one process per rank: tokens, and who ends with whom."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from live_server import caught, eventually
from oracle import References, assert_judged_right
from process_tree import descendants, is_alive
from prompt_set import random_ids, random_prompts
from served_runtime import ServedRuntime
from tiny_model import write_tiny_model
from vllm_serving import (
    ANSWER_S,
    LONG,
    MARKS,
    answers_of_decode_alone,
    check_handoffs_at_once,
    check_prefix_hits,
    serve_pair,
    warm_prefixes,
)

pytestmark = [*MARKS, pytest.mark.asyncio(loop_scope="module")]

END_S = 20.0
TWO_RANKS = {"prefill:tensor_parallel_size": "2", "decode:tensor_parallel_size": "2"}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("vllm") / "llama", hidden=256, head_size=32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(model_dir: Path) -> AsyncIterator[ServedRuntime]:
    """Two ranks on either side, each of whose blocks is compared."""
    async with serve_pair(model_dir, engine_args=TWO_RANKS) as pair:
        yield pair


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def references(pair: ServedRuntime, model_dir: Path) -> References:
    prompts = {name: ids for name, ids in random_prompts().items() if len(ids) <= 257}
    return await answers_of_decode_alone(pair, model_dir, prompts, max_tokens=24)


def ranks_of(engine_pid: int) -> list[int]:
    """Its rank processes; Python's own helper process is not one."""
    return [
        pid
        for pid in descendants(engine_pid)
        if b"resource_tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


async def test_alone_is_what_transformers_answers(references: References) -> None:
    for name, reference in references.items():
        assert_judged_right(name, reference)


async def test_handed_off_all_at_once(pair: ServedRuntime, references: References) -> None:
    await check_handoffs_at_once(pair, references, max_tokens=24)


async def test_with_prefix_hits_on_both_workers(pair: ServedRuntime, references: References) -> None:
    prompts = await warm_prefixes(pair, references)
    await check_prefix_hits(pair, references, prompts, max_tokens=24)


async def test_clients_that_leave(pair: ServedRuntime) -> None:
    rng = random.Random(7)
    for _round in range(2):
        salt = secrets.token_hex(4)
        prompts = [random_ids(rng, rng.choice((40, 300, 900))) for _ in range(4)]
        tasks = [asyncio.create_task(pair.answer(ids, salt=salt, max_tokens=20)) for ids in prompts]
        for task in tasks:
            for _ in range(rng.randrange(20)):
                await pair.runtime.status()  # a turn of both engines
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pair.settle()


async def is_pushing(pair: ServedRuntime) -> bool:
    return all(status.open_handoffs for status in (await pair.runtime.status()).values())


async def test_a_rank_that_is_killed_ends_its_engine_and_no_request(pair: ServedRuntime) -> None:
    engine = pair.runtime.pids()["prefill-0"]
    ranks = ranks_of(engine)
    assert len(ranks) == 2
    prompt_ids = random_ids(random.Random(1), LONG)
    expected = await pair.answer(prompt_ids, salt="expected", local_prefill="always", max_tokens=24)
    answer = await caught(
        lambda: is_pushing(pair),
        lambda: pair.answer(prompt_ids, salt=secrets.token_hex(4), max_tokens=24),
        ANSWER_S,
    )
    os.kill(ranks[1], signal.SIGKILL)
    await eventually(lambda: not any(is_alive(pid) for pid in (engine, *ranks)), END_S)
    assert (await answer).token_ids == expected.token_ids


async def test_ranks_do_not_outlive_their_engine(pair: ServedRuntime) -> None:
    engine = pair.runtime.pids()["decode-0"]
    ranks = ranks_of(engine)
    os.kill(engine, signal.SIGKILL)
    await eventually(lambda: not any(is_alive(pid) for pid in ranks), END_S)
    await eventually(lambda: pair.runtime.pids().get("decode-0") != engine, END_S)
