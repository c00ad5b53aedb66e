"""A handoff that works and whose prompt is computed again on decode all the same: nobody notices but the clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from served_runtime import serve

from dynrt.runtime import RuntimeConfig
from dynrt.runtime.planning import PlannerActor, PlannerMessage, StepSeen, WorkerUp

BLOCK = 32  # tokens


async def test_decode_computes_no_prompt_token(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a block, blocks to the token, and more; without hits, and with hits on both."""
    computed = {"prefill": 0, "decode": 0}
    roles: dict[str, str] = {}
    tell = PlannerActor.tell

    def note(planner: PlannerActor, message: PlannerMessage) -> None:
        if isinstance(message, WorkerUp):
            roles[message.register.incarnation] = message.register.role
        elif isinstance(message, StepSeen) and message.timing is not None:
            computed[roles[message.incarnation]] += message.timing.prefill_tokens
        tell(planner, message)

    monkeypatch.setattr(PlannerActor, "tell", note)
    lengths = [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 7]
    async with serve(RuntimeConfig(str(tiny_model_dir), dtype="float32", local_prefill="never")) as served:
        for _ in range(2):
            for length in lengths:
                await served.answer([20 + length] * length, salt=str(length), max_tokens=4)
        assert served.metric("dynrt_handoffs_total", outcome="committed") == 2 * len(lengths)
    assert computed["prefill"] >= sum(lengths) and computed["decode"] == 0
