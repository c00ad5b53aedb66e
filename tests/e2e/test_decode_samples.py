"""Real processes, and a decode engine that samples the first token itself: the client sees each token once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from served_runtime import serve

from dynrt.runtime import RuntimeConfig, spawner

ENGINE = Path(__file__).with_name("sampling_engine.py")


async def test_decode_samples_the_first_token(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawner, "dynrt_command", lambda: [sys.executable, str(ENGINE)])
    config = RuntimeConfig(str(tiny_model_dir), engine="sim")
    async with serve(config) as served:
        for length, max_tokens in ((7, 1), (32, 2), (100, 30)):
            prompt_ids = list(range(20, 20 + length))
            request = {"salt": str(length), "max_tokens": max_tokens}
            handed = await served.answer(prompt_ids, local_prefill="never", **request)
            here = await served.answer(prompt_ids, local_prefill="always", **request)
            assert (handed.token_ids, handed.text) == (here.token_ids, here.text)
            assert handed.finish_reason == "length" and handed.cached_tokens == 0
        assert served.metric("dynrt_handoffs_total", outcome="committed") == 3
        await served.settle()
        assert served.metric("dynrt_handoff_exposed_seconds_count") == 3
        again = await served.answer(list(range(20, 120)), local_prefill="never", salt="100", max_tokens=30)
        assert 90 < again.cached_tokens < 100, "prefill's hit, not what decode found computed"


async def test_its_death_costs_no_token(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawner, "dynrt_command", lambda: [sys.executable, str(ENGINE)])
    async with serve(RuntimeConfig(str(tiny_model_dir), engine="sim", local_prefill="never")) as served:
        prompt_ids = list(range(20, 90))
        expected = await served.answer(prompt_ids, max_tokens=60)
        answer = asyncio.create_task(served.answer(prompt_ids, max_tokens=60))
        await asyncio.sleep(0)
        os.kill(served.runtime.pids()["decode-0"], signal.SIGKILL)
        assert (await answer).token_ids == expected.token_ids
