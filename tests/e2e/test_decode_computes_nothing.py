"""A handoff that works and whose prompt is computed again on decode all the same: nobody notices but the clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from served_runtime import serve

from dynrt.runtime import RuntimeConfig
from dynrt.runtime.messages import EngineLoad, StepTiming
from dynrt.runtime.planning import PlannerActor, PlannerMessage, WorkerUp

BLOCK = 32  # tokens


async def test_decode_computes_no_prompt_token(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a block, blocks to the token, and more; without hits, and with hits on both."""
    computed = {"prefill": 0, "decode": 0}
    roles: dict[str, str] = {}
    tell, step = PlannerActor.tell, PlannerActor.step

    def note_worker(planner: PlannerActor, message: PlannerMessage) -> None:
        if isinstance(message, WorkerUp):
            roles[message.register.incarnation] = message.register.role
        tell(planner, message)

    def note_step(
        planner: PlannerActor, incarnation: str, load: EngineLoad, timing: StepTiming | None
    ) -> None:
        if timing is not None:
            computed[roles[incarnation]] += timing.prefill_tokens
        step(planner, incarnation, load, timing)

    monkeypatch.setattr(PlannerActor, "tell", note_worker)
    monkeypatch.setattr(PlannerActor, "step", note_step)
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 7]
    async with serve(RuntimeConfig(str(tiny_model_dir), dtype="float32", local_prefill="never")) as served:
        for _ in range(2):
            for length in lengths:
                await served.answer([20 + length] * length, salt=str(length), max_tokens=4)
        assert served.metric("dynrt_handoffs_total", outcome="committed") == 2 * len(lengths)
    assert computed["prefill"] >= sum(lengths) and computed["decode"] == 0
