"""vLLM engines with tensor parallel behind the runtime, one process per rank: tokens, and who ends with whom."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from live_server import eventually
from oracle import References, assert_all_same, assert_judged_right, judged
from process_tree import descendants, is_alive
from prompt_set import BLOCK_SIZE, random_ids, random_prompts
from served_runtime import ServedRuntime, serve
from tiny_model import write_tiny_model
from vllm_environment import vllm_command

from dynrt.runtime import RuntimeConfig, spawner
from dynrt.transfer.options import TransferOptions

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),  # the environment may have to be built
    pytest.mark.asyncio(loop_scope="module"),
]

START_S = 300.0  # importing vLLM takes 10 s of CPU in each of six processes
END_S = 20.0
ANSWER_S = 120.0
LONG = 1500  # tokens, computed in 47 steps


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("vllm") / "llama", hidden=256, head_size=32)


@pytest.fixture(scope="module", autouse=True)
def _engines_where_vllm_is() -> Iterator[None]:
    command = vllm_command("python", "-P", "-m", "dynrt.runtime.cli")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawner, "dynrt_command", lambda: command)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(model_dir: Path, _engines_where_vllm_is: None) -> AsyncIterator[ServedRuntime]:
    """Two ranks on either side. Each block of each rank is compared with what was sent, before its request goes on."""
    config = RuntimeConfig(
        model=str(model_dir),
        engine="vllm",
        dtype="float32",
        threads=1,
        local_prefill="never",
        kv_blocks=64,
        max_batch_tokens=32,
        engine_args={"prefill:tensor_parallel_size": "2", "decode:tensor_parallel_size": "2"},
        transfer=TransferOptions(verify=True),
        heartbeat_interval_s=0.2,
        heartbeat_limit_s=10.0,  # the machine may be busy with other things
    )
    async with serve(config) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def references(pair: ServedRuntime, model_dir: Path) -> References:
    """What decode answers alone, one prompt at a time."""
    prompts = {name: ids for name, ids in random_prompts().items() if len(ids) <= 257}
    answers = {
        name: await pair.answer(ids, local_prefill="always", salt="alone", max_tokens=24)
        for name, ids in prompts.items()
    }
    return judged(model_dir, prompts, answers)


def prompts_of(references: References) -> dict[str, list[int]]:
    return {name: reference.prompt_ids for name, reference in references.items()}


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
    committed_before = pair.metric("dynrt_handoffs_total", outcome="committed")
    answers = await pair.answers(prompts_of(references), salt="at once", max_tokens=24)
    assert_all_same(references, answers)
    committed = pair.metric("dynrt_handoffs_total", outcome="committed") - committed_before
    assert committed == len(references)
    await pair.settle()


async def test_with_prefix_hits_on_both_workers(pair: ServedRuntime, references: References) -> None:
    prompts = {name: ids for name, ids in prompts_of(references).items() if len(ids) <= 100}
    await pair.answers(prompts, salt="hits", max_tokens=2)
    await pair.settle()
    answers = await pair.answers(prompts, salt="hits", max_tokens=24)
    assert_all_same(references, answers)
    for name, prompt_ids in prompts.items():
        hit = (len(prompt_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last token is always computed
        assert answers[name].cached_tokens == hit, name


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
    answer = asyncio.create_task(pair.answer(prompt_ids, salt="cold", max_tokens=24))
    await eventually(lambda: is_pushing(pair), ANSWER_S)
    os.kill(ranks[1], signal.SIGKILL)
    await eventually(lambda: not any(is_alive(pid) for pid in (engine, *ranks)), END_S)
    assert (await answer).token_ids == expected.token_ids


async def test_ranks_do_not_outlive_their_engine(pair: ServedRuntime) -> None:
    engine = pair.runtime.pids()["decode-0"]
    ranks = ranks_of(engine)
    os.kill(engine, signal.SIGKILL)
    await eventually(lambda: not any(is_alive(pid) for pid in ranks), END_S)
    await eventually(lambda: pair.runtime.pids().get("decode-0") != engine, END_S)
