"""One request inside the scheduler: its tokens, its blocks, how far it is computed, and when it ends (sans-IO)."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from dynrt.engines.protocol import EngineRequest
from dynrt.engines.scheduling.batch import Chunk, SampleSpec, ScoreSpec
from dynrt.engines.scheduling.logit_changes import LogitChanges
from dynrt.runtime.messages import FinishReason, TokenLogprob

RequestId = tuple[bytes, int]  # (key, epoch)


class Sequence(msgspec.Struct, eq=False, weakref=True):
    """`token_ids` are all known tokens; the KV of the first `num_computed` of them is in `block_ids`."""

    request: EngineRequest
    token_ids: list[int]
    num_given: int  # tokens known when the request came to run here
    block_ids: list[int] = []
    num_computed: int = 0
    num_stored: int = 0  # leading blocks that are in the prefix cache
    num_announced: int = 0  # leading blocks that were announced for the handoff
    cached_tokens: int | None = None  # the prefix hit of the first admission
    admitted_at: float | None = None  # when that was
    # Of the prompt's tokens so far, None for the first, until they leave with the first token sampled here. None: not
    # asked for, or told before.
    prompt_logprobs: list[TokenLogprob | None] | None = None
    changes: LogitChanges | None = None

    @classmethod
    def of(cls, request: EngineRequest) -> Sequence:
        sampling = request.sampling
        token_ids = [*request.prompt_ids, *request.output_ids]
        is_scored = sampling.prompt_logprobs is not None and not request.output_ids
        return cls(
            request,
            token_ids,
            num_given=len(token_ids),
            prompt_logprobs=[None] if is_scored else None,
            changes=LogitChanges.of(sampling, request.prompt_ids),
        )

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

    @property
    def num_skippable(self) -> int:
        """How many tokens need not be computed if the cache has them: those of which nobody wants the logits."""
        if self.prompt_logprobs is None:
            return len(self.token_ids) - 1
        return len(self.prompt_logprobs) - 1

    def take_prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """All of them, once; None if there are none to tell."""
        logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        num_prompt = len(self.request.prompt_ids)
        assert logprobs is None or len(logprobs) == num_prompt, f"{len(logprobs)} of {num_prompt} are scored"
        return logprobs

    def next_chunk(self, max_tokens: int, eos_token_ids: Collection[int]) -> Chunk:
        """The next at most `max_tokens` tokens to compute."""
        start, end = self.num_computed, min(self.num_computed + max_tokens, len(self.token_ids))
        is_last = end == len(self.token_ids)
        sample = self._sample_spec(eos_token_ids) if is_last else None
        score = self._score_spec(start, end)
        return Chunk(self.token_ids[start:end], start, list(self.block_ids), sample, score)

    def finish_of(
        self, token_id: int, eos_token_ids: Collection[int]
    ) -> tuple[FinishReason | None, int | None]:
        """Why the request ends with `token_id`, its latest token, and the stop token id if that is the reason.

        A grammar allows the end of sequence only where it may end, and then that is the end.
        """
        sampling = self.request.sampling
        if token_id in eos_token_ids and (not sampling.ignore_eos or sampling.grammar is not None):
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
        if self.changes is not None:
            self.changes.follow(self.token_ids, len(self.request.prompt_ids))
        sampling = self.request.sampling
        if self.num_outputs >= sampling.min_tokens:
            return SampleSpec(sampling, self.num_outputs, changes=self.changes)
        ending_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ending_ids.update(eos_token_ids)
        return SampleSpec(sampling, self.num_outputs, tuple(sorted(ending_ids)), self.changes)

    def _score_spec(self, start: int, end: int) -> ScoreSpec | None:
        """Of the tokens [start, end), those whose logits say how likely a prompt token was that is not scored yet."""
        num_top = self.request.sampling.prompt_logprobs
        if self.prompt_logprobs is None or num_top is None:
            return None
        first = max(start, len(self.prompt_logprobs) - 1)
        target_ids = self.token_ids[first + 1 : min(end + 1, len(self.request.prompt_ids))]
        return ScoreSpec(first - start, target_ids, num_top) if target_ids else None
