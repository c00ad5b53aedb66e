"""Engine processes that are killed or hang: the runtime stays up, requests end rightly, nothing leaks."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from live_server import START_S, caught, eventually, greedy, is_clean, outcome_of, prompt, tokens_of
from process_tree import descendants, open_fds, orphaned_shared_memory, shared_memory_of
from rig.live_runtime import counter
from tiny_model import write_tiny_model

from dynrt.runtime import GenerateRequest, Runtime, RuntimeConfig
from dynrt.runtime.errors import ConfigError, DynrtError, NoWorkerError

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

RESTART_LIMIT = 5
WORKERS = {"prefill-0", "decode-0"}

LONG = greedy(prompt(1500, seed=1), 8)  # prefilled in 47 steps
STREAM = greedy(prompt(60, seed=2), 150)
SHORT = greedy(prompt(100, seed=3), 12)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Slow enough to be killed in the middle of a handoff."""
    path = tmp_path_factory.mktemp("faults") / "llama"
    return write_tiny_model(path, hidden=256)


def config(model_dir: Path, **fields: object) -> RuntimeConfig:
    return RuntimeConfig(
        model=str(model_dir),
        dtype="float32",
        local_prefill="never",
        kv_blocks=1024,
        max_batch_tokens=32,
        threads=1,
        heartbeat_interval_s=0.2,
        heartbeat_limit_s=1.5,
        **fields,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def runtime(model_dir: Path) -> AsyncIterator[Runtime]:
    async with Runtime(config(model_dir)) as runtime:
        yield runtime


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(runtime: Runtime) -> dict[bytes, list[int]]:
    """The right answers, by prompt."""
    return {request.prompt_ids: await tokens_of(runtime, request) for request in (LONG, STREAM, SHORT)}


def engine_pids() -> set[int]:
    return descendants(os.getpid())


async def is_pushing(runtime: Runtime) -> bool:
    """A handoff is open on both ends, and prefill still computes: its status comes between two steps."""
    statuses = await runtime.status()
    return all(statuses[worker].open_handoffs for worker in WORKERS)


async def decodes(runtime: Runtime) -> bool:
    return (await runtime.status())["decode-0"].load.running_requests > 0


FAULTS = [  # who, how, and in what of the affected request
    pytest.param({"prefill-0"}, signal.SIGKILL, LONG, is_pushing, id="prefill killed while it pushes"),
    pytest.param({"decode-0"}, signal.SIGKILL, STREAM, decodes, id="decode killed while it streams"),
    pytest.param({"decode-0"}, signal.SIGKILL, LONG, is_pushing, id="decode killed while it receives"),
    pytest.param(WORKERS, signal.SIGKILL, LONG, is_pushing, id="both killed"),
    pytest.param({"prefill-0"}, signal.SIGSTOP, LONG, is_pushing, id="prefill hangs"),
    pytest.param({"decode-0"}, signal.SIGSTOP, STREAM, decodes, id="decode hangs"),
]


@pytest.mark.parametrize(("victims", "fault", "request_", "moment"), FAULTS)
async def test_workers_lost(
    runtime: Runtime,
    undisturbed: dict[bytes, list[int]],
    victims: set[str],
    fault: signal.Signals,
    request_: GenerateRequest,
    moment: Callable[[Runtime], object],
) -> None:
    await eventually(lambda: set(runtime.pids()) == WORKERS, START_S)
    await eventually(lambda: hands_off(runtime))
    before, fds_before = runtime.pids(), await fds_of(runtime)

    def ask() -> Coroutine[Any, Any, list[int] | DynrtError]:
        cold = msgspec.structs.replace(request_, salt=secrets.token_hex(4))  # no cached prefix shortens it
        return outcome_of(runtime, cold)

    affected = await caught(lambda: moment(runtime), ask)
    shm = shared_memory_of(before[victim] for victim in victims)
    for victim in victims:
        os.kill(before[victim], fault)
    bystander = asyncio.create_task(outcome_of(runtime, SHORT))

    for task, its_request in ((affected, request_), (bystander, SHORT)):
        ended_s = await eventually(task.done)
        outcome = task.result()
        print(f"ended in {ended_s:.2f} s: {outcome if isinstance(outcome, DynrtError) else 'right answer'}")
        assert is_right(outcome, undisturbed[its_request.prompt_ids])
    restarted_s = await eventually(lambda: is_restarted(runtime, before, victims), START_S)
    print(f"restarted in {restarted_s:.2f} s")

    assert await tokens_of(runtime, SHORT) == undisturbed[SHORT.prompt_ids]
    await eventually(lambda: is_clean(runtime))
    assert engine_pids() == set(runtime.pids().values())
    await eventually(lambda: holds_fds(runtime, fds_before, WORKERS - victims))
    await eventually(lambda: shm.isdisjoint(orphaned_shared_memory()))


async def hands_off(runtime: Runtime) -> bool:
    """The workers are connected: a request is served by both of them."""
    committed = 'dynrt_handoffs_total{outcome="committed"}'
    before = counter(runtime, committed)
    await tokens_of(runtime, SHORT)
    return counter(runtime, committed) > before


def is_right(outcome: list[int] | DynrtError, expected: list[int]) -> bool:
    if isinstance(outcome, NoWorkerError):
        return "try again" in str(outcome)
    return outcome == expected


def is_restarted(runtime: Runtime, before: dict[str, int], victims: set[str]) -> bool:
    """All workers are there, connected, and the victims' processes are others than before."""
    now = runtime.pids()
    return set(now) == WORKERS and all(
        (now[worker] != before[worker]) == (worker in victims) for worker in now
    )


async def fds_of(runtime: Runtime) -> dict[str, int]:
    """Open file descriptors of this process and of each worker."""
    statuses = await runtime.status()
    return {"runtime": open_fds()} | {worker: status.open_fds for worker, status in statuses.items()}


async def holds_fds(runtime: Runtime, before: dict[str, int], survivors: set[str]) -> bool:
    """This process as many as before, and no survivor more: none belongs to a lost peer."""
    now = await fds_of(runtime)
    return now["runtime"] == before["runtime"] and all(now[one] <= before[one] for one in survivors)


async def test_an_engine_killed_again_and_again_is_given_up(tiny_model_dir: Path) -> None:
    async with Runtime(config(tiny_model_dir, prefill=0, no_worker_wait_s=0.5)) as runtime:
        seen = engine_pids() - set(runtime.pids().values())
        for _ in range(1 + RESTART_LIMIT):
            await eventually(lambda: engine_pids() - seen)
            [pid] = engine_pids() - seen
            seen.add(pid)
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(NoWorkerError, match="try again"):
            await tokens_of(runtime, SHORT)
        assert runtime.ready() == "no engine is up"
        assert runtime.idle()


async def test_an_engine_killed_before_it_is_ready_ends_the_start(tiny_model_dir: Path) -> None:
    fds_before, others = open_fds(), engine_pids()
    starting = asyncio.create_task(Runtime(config(tiny_model_dir)).__aenter__())
    await eventually(lambda: len(engine_pids() - others) == 2)
    os.kill(min(engine_pids() - others), signal.SIGKILL)
    with pytest.raises(ConfigError, match="ended with status -9 before it was ready"):
        await starting
    assert engine_pids() == others
    await eventually(lambda: open_fds() == fds_before)
