"""Over HTTP: what would wait for too long is refused at once, with the time after which to try again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from live_server import Embedded, embedded
from prometheus_client.parser import text_string_to_metric_families

from dynrt.engines.config import SimConfig
from dynrt.runtime import RuntimeConfig

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(120)]

SLOW = SimConfig(speedup=0.02)  # a step takes a third of a second at least
AT_ONCE = 8


def refused_plans(server: Embedded) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(server.runtime.metrics_text().decode())
        for sample in family.samples
        if sample.name == "dynrt_plan_refusals_total"
    )


async def complete(client: aiohttp.ClientSession, prompt: list[int]) -> int:
    """The status; a refusal must look like one."""
    async with client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}) as response:
        if response.status != 200:
            error = (await response.json())["error"]
            assert error["type"] == "overloaded_error" and "the limit" in error["message"]
            assert int(response.headers["Retry-After"]) >= 1
        return response.status


async def test_refused_with_the_time_to_come_back(tiny_model_dir: Path) -> None:
    config = RuntimeConfig(
        str(tiny_model_dir), engine="sim", sim=SLOW, max_ttft_s=0.04, max_waiting_requests=1, kv_blocks=256
    )
    async with embedded(config) as server, aiohttp.ClientSession(server.url) as client:
        long_prompt = list(range(5, 205)) * 2
        assert await complete(client, long_prompt) == 503
        assert refused_plans(server) == 1
        prompts = [[5 + number] * 4 for number in range(AT_ONCE)]
        statuses = await asyncio.gather(*(complete(client, prompt) for prompt in prompts))
        assert set(statuses) == {200, 503}
        assert refused_plans(server) == 1 + statuses.count(503)
