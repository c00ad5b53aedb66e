"""Simulated engines as real processes: real control sockets, real NIXL on host memory, and no torch."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from virtual_engine import expected_outputs

from dynrt.engines.config import SimConfig
from dynrt.runtime import GenerateRequest, Runtime, RuntimeConfig, SamplingParams
from dynrt.runtime.messages import pack_ids
from dynrt.runtime.requests import LocalPrefill

pytestmark = pytest.mark.e2e

VOCAB, EOS = 512, {1, 4}  # of the tiny model
MAX_TOKENS = 48
LIMIT_S = 60.0
SETTLE_POLL_S = 0.02
PROMPTS = [[5 + (i * i * (n + 1) + n) % 500 for i in range(20 + 45 * n)] for n in range(8)]


def sim_runtime(model_dir: Path, speedup: float) -> Runtime:
    return Runtime(RuntimeConfig(model=str(model_dir), engine="sim", sim=SimConfig(speedup=speedup)))


def expected(prompt_ids: list[int]) -> list[int]:
    return expected_outputs(prompt_ids, MAX_TOKENS, VOCAB, EOS)


def request_for(prompt_ids: list[int], local_prefill: LocalPrefill) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=MAX_TOKENS)
    return GenerateRequest(pack_ids(prompt_ids), sampling, local_prefill=local_prefill)


async def answers(runtime: Runtime, local_prefill: LocalPrefill) -> list[list[int]]:
    """To all prompts at once."""
    return await asyncio.gather(*(answer(runtime, prompt_ids, local_prefill) for prompt_ids in PROMPTS))


async def answer(runtime: Runtime, prompt_ids: list[int], local_prefill: LocalPrefill) -> list[int]:
    outputs = runtime.generate(request_for(prompt_ids, local_prefill))
    return [token_id async for output in outputs for token_id in output.token_ids]


async def settle(runtime: Runtime) -> None:
    """Until nothing of any request is left, here or in an engine."""
    while True:
        if runtime.idle() and not await busy_engines(runtime):
            return
        await asyncio.sleep(SETTLE_POLL_S)


async def busy_engines(runtime: Runtime) -> list[str]:
    return [
        name
        for name, status in (await runtime.status()).items()
        if status.load.blocks_active or status.open_handoffs or status.requests
    ]


def mapped_files(pid: int) -> str:
    return Path(f"/proc/{pid}/maps").read_text()


async def test_disaggregated_is_aggregated_without_torch(tiny_model_dir: Path) -> None:
    async with asyncio.timeout(LIMIT_S), sim_runtime(tiny_model_dir, speedup=20) as runtime:
        disaggregated = await answers(runtime, "never")
        await settle(runtime)
        committed = f'dynrt_handoffs_total{{outcome="committed"}} {len(PROMPTS)}.0'
        assert committed in runtime.metrics_text().decode().splitlines()
        aggregated = await answers(runtime, "always")
        await settle(runtime)
        assert committed in runtime.metrics_text().decode().splitlines()
        mapped = {name: mapped_files(pid) for name, pid in runtime.pids().items()}
    assert disaggregated == aggregated == [expected(prompt_ids) for prompt_ids in PROMPTS]
    assert sorted(mapped) == ["decode-0", "prefill-0"]
    assert all("libtorch" not in maps and "ucx" in maps for maps in mapped.values())


async def test_tokens_go_on_where_they_stopped_when_an_engine_dies(tiny_model_dir: Path) -> None:
    async with asyncio.timeout(LIMIT_S), sim_runtime(tiny_model_dir, speedup=1) as runtime:
        outputs = runtime.generate(request_for(PROMPTS[5], "never"))
        token_ids = [token_id for _ in range(4) for token_id in (await anext(outputs)).token_ids]
        os.kill(runtime.pids()["decode-0"], signal.SIGKILL)
        token_ids += [token_id async for output in outputs for token_id in output.token_ids]
        assert "dynrt_request_retries_total 1.0" in runtime.metrics_text().decode().splitlines()
    assert token_ids == expected(PROMPTS[5])
