"""How much there is to compute in one step, in the quantities that its duration depends on (sans-IO)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dynrt.engines.scheduling.batch import Chunk
from dynrt.runtime.messages import StepTiming


class StepWork(msgspec.Struct, frozen=True):
    """A chunk of one token costs what a decode costs, so it counts as one."""

    prefill_tokens: int
    prefill_context: int  # sum over chunks of end² - start² (attention's share)
    decode_requests: int
    decode_kv_tokens: int  # KV that the decodes read, their own tokens' included

    @classmethod
    def of(cls, chunks: Sequence[Chunk]) -> StepWork:
        return cls.of_spans([(chunk.start, chunk.end) for chunk in chunks])

    @classmethod
    def of_spans(cls, spans: Sequence[tuple[int, int]]) -> StepWork:
        """Of sequences whose tokens [start, end) are computed."""
        prefills = [(start, end) for start, end in spans if end - start > 1]
        decodes = [end for start, end in spans if end - start == 1]
        return cls(
            prefill_tokens=sum(end - start for start, end in prefills),
            prefill_context=sum(end**2 - start**2 for start, end in prefills),
            decode_requests=len(decodes),
            decode_kv_tokens=sum(decodes),
        )

    def timing(self, duration_s: float, ended_at: float) -> StepTiming:
        """What is reported of a step that did this; `ended_at` as in StepTiming."""
        return StepTiming(
            duration_s,
            ended_at,
            self.prefill_tokens,
            self.prefill_context,
            self.decode_requests,
            self.decode_kv_tokens,
        )
