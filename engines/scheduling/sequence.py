"""One request inside the scheduler: its tokens, its blocks, how far it is computed, and when it ends (sans-IO)."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from dynrt.engines.protocol import EngineRequest
from dynrt.engines.scheduling.batch import Chunk, SampleSpec
from dynrt.runtime.messages import FinishReason

RequestId = tuple[bytes, int]  # (key, epoch)


class Sequence(msgspec.Struct, eq=False):
    """`token_ids` are all known tokens; the KV of the first `num_computed` of them is in `block_ids`."""

    request: EngineRequest
    token_ids: list[int]
    num_given: int  # tokens known when the request came to run here
    block_ids: list[int] = []
    num_computed: int = 0
    num_stored: int = 0  # leading blocks that are in the prefix cache
    num_announced: int = 0  # leading blocks that were announced for the handoff
    cached_tokens: int | None = None  # the prefix hit of the first admission

    @classmethod
    def of(cls, request: EngineRequest) -> Sequence:
        token_ids = [*request.prompt_ids, *request.output_ids]
        return cls(request, token_ids, num_given=len(token_ids))

    @property
    def id(self) -> RequestId:
        return self.request.key, self.request.epoch

    @property
    def salt(self) -> str:
        return self.request.salt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def num_outputs(self) -> int:
        """Output tokens so far, those generated elsewhere included; so, the next one's position."""
        return len(self.token_ids) - len(self.request.prompt_ids)

    def next_chunk(self, max_tokens: int, eos_token_ids: Collection[int]) -> Chunk:
        """The next at most `max_tokens` tokens to compute."""
        start, end = self.num_computed, min(self.num_computed + max_tokens, len(self.token_ids))
        is_last = end == len(self.token_ids)
        sample = self._sample_spec(eos_token_ids) if is_last else None
        return Chunk(self.token_ids[start:end], start, list(self.block_ids), sample)

    def finish_of(
        self, token_id: int, eos_token_ids: Collection[int]
    ) -> tuple[FinishReason | None, int | None]:
        """Why the request ends with `token_id`, its latest token, and the stop token id if that is the reason."""
        sampling = self.request.sampling
        if token_id in eos_token_ids and not sampling.ignore_eos:
            return "stop", None
        if token_id in sampling.stop_token_ids:
            return "stop", token_id
        if self.num_outputs >= sampling.max_tokens:
            return "length", None
        return None, None

    def count_uneventful(self, block_size: int) -> int:
        """How many decode steps lie before its first token, its last one, or the edge of its last block."""
        if self.request.prefill_only or not self.num_outputs:
            return 0
        left_in_block = len(self.block_ids) * block_size - self.num_computed - 1
        return max(0, min(left_in_block, self.request.sampling.max_tokens - self.num_outputs - 1))

    def reset(self) -> list[int]:
        """Forget what was computed and hand the blocks back."""
        block_ids, self.block_ids = self.block_ids, []
        self.num_computed = self.num_stored = 0
        return block_ids

    def _sample_spec(self, eos_token_ids: Collection[int]) -> SampleSpec:
        sampling = self.request.sampling
        if self.num_outputs >= sampling.min_tokens:
            return SampleSpec(sampling, self.num_outputs)
        ending_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ending_ids.update(eos_token_ids)
        return SampleSpec(sampling, self.num_outputs, tuple(sorted(ending_ids)))
