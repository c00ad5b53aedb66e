"""vLLM engines behind the runtime: the same tokens handed off as here, and nothing left behind by what goes wrong."""

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
from prompt_set import BLOCK_SIZE, random_ids, random_prompts
from served_runtime import ServedRuntime, serve
from tiny_model import write_tiny_model
from vllm_environment import vllm_command

from dynrt.runtime import RuntimeConfig, spawner
from dynrt.runtime.messages import Status
from dynrt.transfer.options import TransferOptions

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.timeout(1200),  # the environment may have to be built
    pytest.mark.asyncio(loop_scope="module"),
]

START_S = 300.0  # importing vLLM takes 10 s of CPU, on a machine that may be busy
HEARTBEAT_LIMIT_S = 10.0  # the machine may be busy with other things
ANSWER_S = 120.0
NUM_BLOCKS = 64
LONG = 1500  # tokens, computed in 47 steps


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slow enough to be killed in the middle of a handoff."""
    return write_tiny_model(tmp_path_factory.mktemp("vllm") / "llama", hidden=256, head_size=32)


@pytest.fixture(scope="module", autouse=True)
def _engines_where_vllm_is() -> Iterator[None]:
    command = vllm_command("python", "-P", "-m", "dynrt.runtime.cli")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spawner, "dynrt_command", lambda: command)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(model_dir: Path, _engines_where_vllm_is: None) -> AsyncIterator[ServedRuntime]:
    """Each block of each layer is compared with what was sent, before its request goes on."""
    config = RuntimeConfig(
        model=str(model_dir),
        engine="vllm",
        dtype="float32",
        threads=1,
        local_prefill="never",
        kv_blocks=NUM_BLOCKS,
        max_batch_tokens=32,
        transfer=TransferOptions(verify=True),
        heartbeat_interval_s=0.2,
        heartbeat_limit_s=HEARTBEAT_LIMIT_S,
    )
    async with serve(config) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def references(pair: ServedRuntime, model_dir: Path) -> References:
    """What decode answers alone, one prompt at a time."""
    prompts = random_prompts()
    answers = {
        name: await pair.answer(ids, local_prefill="always", salt="alone") for name, ids in prompts.items()
    }
    return judged(model_dir, prompts, answers)


def prompts_of(references: References) -> dict[str, list[int]]:
    return {name: reference.prompt_ids for name, reference in references.items()}


async def test_alone_is_what_transformers_answers(references: References) -> None:
    for name, reference in references.items():
        assert_judged_right(name, reference)


async def test_handed_off_all_at_once(pair: ServedRuntime, references: References) -> None:
    committed_before = pair.metric("dynrt_handoffs_total", outcome="committed")
    answers = await pair.answers(prompts_of(references), salt="at once")
    assert_all_same(references, answers)
    committed = pair.metric("dynrt_handoffs_total", outcome="committed") - committed_before
    assert committed == len(references)
    await pair.settle()


async def test_with_prefix_hits_on_both_workers(pair: ServedRuntime, references: References) -> None:
    prompts = {name: ids for name, ids in prompts_of(references).items() if len(ids) <= 100}
    await pair.answers(prompts, salt="hits", max_tokens=2)
    await pair.settle()
    pushed_before = pair.metric("dynrt_kv_bytes_pushed_total")
    answers = await pair.answers(prompts, salt="hits")
    assert_all_same(references, answers)
    for name, prompt_ids in prompts.items():
        hit = (len(prompt_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last token is always computed
        assert answers[name].cached_tokens == hit, name
    await pair.settle()
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
    pair: ServedRuntime, victim: str, fault: signal.Signals, num_tokens: int, moment: object
) -> None:
    await eventually(lambda: hands_off(pair), START_S)
    before = pair.runtime.pids()
    prompt_ids = random_ids(random.Random(num_tokens), num_tokens)
    expected = await pair.answer(prompt_ids, salt="expected", max_tokens=100)
    cold = secrets.token_hex(4)
    answer = asyncio.create_task(pair.answer(prompt_ids, salt=cold, max_tokens=100))
    await eventually(lambda: moment(pair), ANSWER_S)  # type: ignore[operator]
    os.kill(before[victim], fault)
    assert (await answer).token_ids == expected.token_ids
    await pair.settle()
    await eventually(lambda: is_replaced(pair, before, victim), START_S)
    again = await pair.answer(prompt_ids, salt=cold, max_tokens=100)
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
