"""When what happened to a request, in seconds of this host's CLOCK_MONOTONIC; read once it has ended.

Workers on this host say when their steps began and ended; of those elsewhere it is when the runtime heard of it.
"""

from __future__ import annotations

import msgspec


class StageTimes(msgspec.Struct):
    """One attempt: the moments at which its stages ended, as far as they came about and were seen."""

    prefill: str  # workers, the same for a local plan
    decode: str
    planned_at: float | None = None
    admitted_at: float | None = None  # the first step over its prompt began
    computed_at: float | None = None  # the step that sampled behind its prompt ended
    received_at: float | None = None  # decode had all KV of a handed-off prompt
    ended_at: float | None = None
    kv_bytes: int = 0  # pushed
    link_s: float = 0.0  # that the link was busy with them
    reason: str = ""  # why it ended, if not because the request was finished

    @property
    def is_remote(self) -> bool:
        return self.prefill != self.decode


class RequestTimes(msgspec.Struct, frozen=True):
    """A request, from its arrival in the runtime."""

    began_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    stages: list[StageTimes] = []

    @property
    def admitted_at(self) -> float | None:
        """When the attempt that computed its prompt began to."""
        for stage in reversed(self.stages):
            if stage.admitted_at is not None:
                return stage.admitted_at
        return None

    @property
    def computed_at(self) -> float | None:
        """When it had."""
        for stage in reversed(self.stages):
            if stage.computed_at is not None:
                return stage.computed_at
        return None
