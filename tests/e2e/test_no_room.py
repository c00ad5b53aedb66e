"""Decode workers full of long requests: a finished prompt goes elsewhere, and its answer is the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
from live_server import eventually
from served_runtime import Answer, ServedRuntime, serve
from tiny_model import write_tiny_model

from dynrt.runtime import RuntimeConfig, parts

PROMPT = [20 + position % 400 for position in range(700)]  # 22 of 40 blocks: no two of them fit
LONG_OUTPUT, OUTPUT = 540, 12


@asynccontextmanager
async def full_decode_workers(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, room_s: float
) -> AsyncIterator[tuple[ServedRuntime, list[asyncio.Task[Answer]], Answer]]:
    """Two decode workers, each with a long request of that task, and what the answer to PROMPT must be."""
    limits = msgspec.structs.replace(parts._LEDGER_LIMITS, room_s=room_s)
    monkeypatch.setattr(parts, "_LEDGER_LIMITS", limits)
    config = RuntimeConfig(str(model_dir), dtype="float32", decode=2, local_prefill="never", kv_blocks=40)
    async with serve(config) as served:
        expected = await served.answer(PROMPT, max_tokens=OUTPUT)
        long = [
            asyncio.create_task(served.answer(PROMPT, salt=salt, max_tokens=LONG_OUTPUT))
            for salt in ("a", "b")
        ]
        await eventually(lambda: committed(served) == 3)  # both long requests decode
        yield served, long, expected
        for task in long:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def committed(served: ServedRuntime) -> float:
    return served.metric("dynrt_handoffs_total", outcome="committed")


def retargets(served: ServedRuntime, outcome: str) -> float:
    return served.metric("dynrt_handoff_retargets_total", outcome=outcome)


async def test_a_finished_prompt_goes_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Deep, so that the long requests outlast all that follows.
    model_dir = write_tiny_model(tmp_path / "llama", num_layers=24)
    async with full_decode_workers(model_dir, monkeypatch, room_s=0.5) as (served, long, expected):
        answer = await served.answer(PROMPT, max_tokens=OUTPUT, salt="c")
        assert (answer.token_ids, answer.text, answer.cached_tokens) == (expected.token_ids, expected.text, 0)
        assert (retargets(served, "moved"), retargets(served, "local")) == (1, 1), "prefill decoded on"
        assert not any(task.done() for task in long), "they were not disturbed"

        moving = asyncio.create_task(served.answer(PROMPT, max_tokens=OUTPUT, salt="d"))
        await eventually(lambda: retargets(served, "moved") == 2)
        for task in long:
            task.cancel()
        assert (await moving).token_ids == expected.token_ids
        assert retargets(served, "local") == 1 and committed(served) == 4, "another worker decoded it"
