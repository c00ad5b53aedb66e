"""Handoffs that go wrong under a whole runtime with real engines: what clients get, what is counted, what is left."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rig.live_runtime import counter, seconds_until

from dynrt.runtime import GenerateRequest, Runtime, RuntimeConfig
from dynrt.runtime.errors import EngineError
from dynrt.runtime.messages import SamplingParams, pack_ids
from dynrt.transfer.faults import Fault
from dynrt.transfer.options import TransferOptions

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEADLINE_S = 60.0
REPOSITORY = Path(__file__).parents[2]


@asynccontextmanager
async def runtime_with(model_dir: Path, *faults: Fault, verify: bool = False) -> AsyncIterator[Runtime]:
    config = RuntimeConfig(
        str(model_dir),
        dtype="float32",
        threads=1,
        kv_blocks=256,
        local_prefill="never",
        transfer=TransferOptions(verify=verify, faults=faults),
    )
    async with Runtime(config) as runtime:
        yield runtime


def request(seed: int, num_tokens: int = 300) -> GenerateRequest:
    draw = Random(seed)
    prompt_ids = pack_ids([draw.randrange(5, 250) for _ in range(num_tokens)])
    return GenerateRequest(prompt_ids, SamplingParams(6, temperature=0.0, ignore_eos=True))


async def tokens_of(runtime: Runtime, wanted: GenerateRequest) -> list[int]:
    token_ids: list[int] = []
    async with asyncio.timeout(DEADLINE_S):
        async for output in runtime.generate(wanted):
            token_ids += output.token_ids
    return token_ids


async def eventually(condition: Callable[[], Any | Awaitable[Any]]) -> None:
    await seconds_until(condition, DEADLINE_S)


async def is_settled(runtime: Runtime) -> bool:
    """Both workers are up, and nothing is held anywhere."""
    return runtime.idle() and len(runtime.pids()) == 2 and not await holds(runtime)


async def hands_off(runtime: Runtime) -> bool:
    """A request is served by the pair, not by decode alone as while their connection is being made again."""
    committed = 'dynrt_handoffs_total{outcome="committed"}'
    before = counter(runtime, committed)
    await tokens_of(runtime, request(3))
    return counter(runtime, committed) > before


async def holds(runtime: Runtime) -> int:
    statuses = (await runtime.status()).values()
    return sum(status.open_handoffs + status.requests + status.load.blocks_active for status in statuses)


async def test_corrupted_kv_fails_its_request_alone_and_is_counted(tiny_model_dir: Path) -> None:
    async with runtime_with(tiny_model_dir, Fault("corrupt", limit=1), verify=True) as runtime:
        with pytest.raises(EngineError, match="arrived corrupted and was not used: rank 0, layer 0"):
            await tokens_of(runtime, request(1))
        assert counter(runtime, 'dynrt_handoff_failures_total{reason="checksum"}') == 1
        assert counter(runtime, 'dynrt_handoffs_total{outcome="failed"}') == 1
        tokens = await tokens_of(runtime, request(1))
        assert tokens == await tokens_of(runtime, request(1)) and len(tokens) == 6
        assert counter(runtime, 'dynrt_handoffs_total{outcome="committed"}') == 2
        await eventually(lambda: is_settled(runtime))
        assert counter(runtime, "dynrt_quarantined_blocks") == 0
        assert counter(runtime, "dynrt_oldest_handoff_seconds") == 0
        for part in ("handoff_exposed", "decode_wait", "decode_first_step", "first_decode"):
            assert counter(runtime, f"dynrt_{part}_seconds_count") == 2


async def test_a_failed_write_moves_the_request_and_the_pair_comes_back(tiny_model_dir: Path) -> None:
    async with runtime_with(tiny_model_dir, Fault("fail", limit=1)) as runtime:
        pids = runtime.pids()
        tokens = await tokens_of(runtime, request(2))
        assert tokens == await tokens_of(runtime, request(2))
        assert counter(runtime, 'dynrt_handoff_failures_total{reason="transport"}') == 1
        await eventually(lambda: is_settled(runtime))
        assert runtime.pids() == pids, "nobody had to be killed"
        await eventually(lambda: hands_off(runtime))


async def test_a_stalled_write_moves_the_request_and_ends_the_worker_that_hangs(tiny_model_dir: Path) -> None:
    async with runtime_with(tiny_model_dir, Fault("stall", limit=1)) as runtime:
        before = runtime.pids()
        tokens = await tokens_of(runtime, request(3))
        await eventually(lambda: runtime.pids().get("prefill-0") not in (before["prefill-0"], None))
        await eventually(lambda: is_settled(runtime))
        assert runtime.pids()["decode-0"] == before["decode-0"]
        assert len(tokens) == 6 and tokens == await tokens_of(runtime, request(3, 300))


def test_requests_cancelled_at_any_moment_leave_nothing_behind(tmp_path: Path) -> None:
    """The quick form of bench/cancels.py; its full form cancels 10,000."""
    bench = subprocess.run(
        [sys.executable, str(REPOSITORY / "bench/cancels.py"), "--quick", "--json"],
        stdout=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=False,
    )
    missed = [bar for bar in json.loads(bench.stdout)["bars"] if not bar["ok"]]
    assert missed == [] and bench.returncode == 0
