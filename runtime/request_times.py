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


class RequestTimes(msgspec.Struct):
    """A request, from its arrival in the runtime."""

    began_at: float
    first_token_at: float | None = None
    last_token_at: float | None = None
    stages: list[StageTimes] = []

    @property
    def queue_s(self) -> float | None:
        """Until the attempt that computed its prompt began to: planned, waiting, and attempts that came to nothing."""
        admitted_at = self._last_admitted_at()
        return None if admitted_at is None else max(0.0, admitted_at - self.began_at)

    @property
    def prefill_s(self) -> float | None:
        """From there to the first token behind the prompt."""
        admitted_at, computed_at = self._last_admitted_at(), self._last_computed_at()
        if admitted_at is None or computed_at is None:
            return None
        return max(0.0, computed_at - admitted_at)

    @property
    def decode_s(self) -> float | None:
        """From there to the last token."""
        computed_at = self._last_computed_at()
        if computed_at is None or self.last_token_at is None:
            return None
        return max(0.0, self.last_token_at - computed_at)

    @property
    def total_s(self) -> float | None:
        """From its arrival to its last token."""
        return None if self.last_token_at is None else max(0.0, self.last_token_at - self.began_at)

    def seconds_per_token(self, num_tokens: int) -> float | None:
        """Behind the first; None if there are none."""
        if num_tokens < 2 or self.first_token_at is None or self.last_token_at is None:
            return None
        return max(0.0, self.last_token_at - self.first_token_at) / (num_tokens - 1)

    def _last_admitted_at(self) -> float | None:
        for stage in reversed(self.stages):
            if stage.admitted_at is not None:
                return stage.admitted_at
        return None

    def _last_computed_at(self) -> float | None:
        for stage in reversed(self.stages):
            if stage.computed_at is not None:
                return stage.computed_at
        return None
