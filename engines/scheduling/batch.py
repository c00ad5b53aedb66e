"""What the scheduler hands to the model for one step."""

from __future__ import annotations

import msgspec

from dynrt.engines.scheduling.logit_changes import LogitChanges
from dynrt.runtime.messages import SamplingParams


class Chunk(msgspec.Struct, frozen=True):
    """Tokens [start, start + len(token_ids)) of one sequence, computed in this step."""

    token_ids: list[int]
    start: int  # tokens before these are in the cache already
    block_ids: list[int]  # the sequence's block table, covering at least start + len(token_ids)
    sample: SampleSpec | None  # set if these are the sequence's last known tokens: sample the next one
    score: ScoreSpec | None = None  # set if log probabilities of prompt tokens are wanted of this chunk

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


class SampleSpec(msgspec.Struct, frozen=True):
    """How to choose the next token: a function of the logits and these alone."""

    params: SamplingParams
    position: int  # index in the output of the token to be chosen
    banned_ids: tuple[int, ...] = ()  # not allowed here (end of sequence below min_tokens)
    changes: LogitChanges | None = None  # as of this position; None: no bias, no penalties


class ScoreSpec(msgspec.Struct, frozen=True):
    """Prompt tokens to be scored: row `first_row + i` of the chunk predicts `target_ids[i]`."""

    first_row: int
    target_ids: list[int]
    num_top: int  # likeliest tokens to be told with each
