"""The simple claim of the field: requests of 4,000 tokens that share 1,000 compute 24.8 % fewer prompt tokens."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from served_runtime import serve
from tiny_model import write_tiny_model

from dynrt.engines.config import SimConfig
from dynrt.runtime.config import EngineKind, RuntimeConfig

PROMPT_TOKENS, SHARED_TOKENS, REQUESTS = 4000, 1000, 5
HIT_TOKENS = 992  # whole blocks of 32: 24.8 % of the prompt

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("engine", ["native", "sim"])
async def test_every_request_behind_the_first_computes_24_8_percent_less(
    tmp_path: Path, engine: EngineKind
) -> None:
    model_dir = write_tiny_model(tmp_path / "tiny", num_layers=2, hidden=32, context=8192)
    config = RuntimeConfig(
        model=str(model_dir),
        engine=engine,
        dtype="float32",
        threads=1,
        local_prefill="never",
        sim=SimConfig(speedup=20.0),
    )
    randomness = random.Random(7)
    shared = [randomness.randrange(5, 250) for _ in range(SHARED_TOKENS)]
    async with serve(config) as served:
        for _ in range(REQUESTS):
            own = [randomness.randrange(5, 250) for _ in range(PROMPT_TOKENS - SHARED_TOKENS)]
            await served.answer(shared + own, max_tokens=2)
        computed = served.metric("dynrt_prefill_tokens_total", source="computed")
        cached = served.metric("dynrt_prefill_tokens_total", source="cached")
    assert cached == (REQUESTS - 1) * HIT_TOKENS
    assert computed == PROMPT_TOKENS + (REQUESTS - 1) * (PROMPT_TOKENS - HIT_TOKENS)
    assert cached / ((REQUESTS - 1) * PROMPT_TOKENS) == pytest.approx(0.248)
