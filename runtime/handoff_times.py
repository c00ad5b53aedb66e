"""When a handed-off prompt was computed, had arrived, and was gone on with: on one clock, whatever is heard first."""

from __future__ import annotations

import msgspec

from dynrt.runtime.messages import StepTiming


class DecodeStart(msgspec.Struct, frozen=True):
    """Where the time between the end of prefill and decode's first own token went, in seconds."""

    wait_s: float
    step_s: float
    total_s: float


class HandoffTimes:
    """Each result is given out once, as soon as what it is made of is known."""

    def __init__(self) -> None:
        self.computed_at: float | None = None  # the end of prefill's last step
        self.received_at: float | None = None  # decode had counted the last unit
        self.first_step: StepTiming | None = None  # decode's, that brought its first own token
        self._exposed_told = False
        self.is_complete = False  # nothing is left to be given out

    def take_exposed_s(self) -> float | None:
        """How much later decode could start than if the transfer had taken no time."""
        if self._exposed_told or self.computed_at is None or self.received_at is None:
            return None
        self._exposed_told = True
        return max(0.0, self.received_at - self.computed_at)

    def take_decode_start(self) -> DecodeStart | None:
        computed_at, received_at, step = self.computed_at, self.received_at, self.first_step
        if self.is_complete or computed_at is None or received_at is None or step is None:
            return None
        self.is_complete = True
        wait_s = max(0.0, step.ended_at - step.duration_s - max(computed_at, received_at))
        return DecodeStart(wait_s, step.duration_s, step.ended_at - computed_at)
