"""Log probabilities of a model that has no distribution: it is always certain of the token that comes (sans-IO)."""

from __future__ import annotations

from dynrt.engines.scheduling.batch import Chunk
from dynrt.engines.scheduling.sequence import Sequence
from dynrt.runtime.messages import TokenLogprob


def certain(token_id: int, num_top: int | None) -> TokenLogprob | None:
    """Probability 1, if it is asked for."""
    if num_top is None:
        return None
    return TokenLogprob(token_id, 0.0, [(token_id, 0.0)][:num_top])


def score_prompt(sequence: Sequence, chunk: Chunk) -> None:
    """Add what this chunk tells of the prompt's tokens."""
    if chunk.score is not None and sequence.prompt_logprobs is not None:
        scores = (certain(token_id, chunk.score.num_top) for token_id in chunk.score.target_ids)
        sequence.prompt_logprobs.extend(scores)
