"""A runtime with real engines around a small random model, and what a bench asks of it."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

from dynrt.runtime import GenerateRequest, Runtime, RuntimeConfig
from dynrt.runtime.messages import SamplingParams, pack_ids
from rig.random_model import write_random_model

POLL_S = 0.01


def config(directory: Path, **fields: Any) -> RuntimeConfig:
    """One thread for each engine, and every prompt handed off."""
    model = write_random_model(directory, hidden=128, num_layers=4)
    settings = {"dtype": "float32", "local_prefill": "never", "threads": 1, "kv_blocks": 1024}
    return RuntimeConfig(str(model), **{**settings, **fields})


def greedy(num_tokens: int, max_tokens: int, random: Random) -> GenerateRequest:
    """A prompt that shares no prefix with another."""
    prompt_ids = [random.randrange(5, 250) for _ in range(num_tokens)]
    return GenerateRequest(pack_ids(prompt_ids), SamplingParams(max_tokens, temperature=0.0, ignore_eos=True))


async def tokens_of(runtime: Runtime, request: GenerateRequest) -> list[int]:
    token_ids: list[int] = []
    async for output in runtime.generate(request):
        token_ids += output.token_ids
    return token_ids


async def is_clean(runtime: Runtime) -> bool:
    """Nothing is open in the runtime, and no worker holds a block, a handoff or a request."""
    statuses = (await runtime.status()).values()
    held = [s for s in statuses if s.requests or s.open_handoffs or s.load.blocks_active]
    return runtime.idle() and not held


async def seconds_until(condition: Callable[[], Any | Awaitable[Any]], limit_s: float) -> float:
    """How long until `condition` (a function or coroutine function) held. Raises TimeoutError."""
    began_at = time.monotonic()
    async with asyncio.timeout(limit_s):
        while True:
            holds = condition()
            if inspect.isawaitable(holds):
                holds = await holds
            if holds:
                return time.monotonic() - began_at
            await asyncio.sleep(POLL_S)


def counter(runtime: Runtime, name: str) -> float:
    """A metric by its name with labels, as it stands in /metrics."""
    for line in runtime.metrics_text().decode().splitlines():
        if line.startswith(f"{name} "):
            return float(line.rpartition(" ")[2])
    raise KeyError(name)
