"""Log probabilities of tokens, and the likeliest tokens beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dynrt.engines.scheduling.batch import SampleSpec, ScoreSpec
from dynrt.runtime.messages import TokenLogprob

ROWS_AT_ONCE = 64  # of the prompt: with 49,152 tokens, 13 MB of logits and as much of their logarithms


def sampled_logprobs(
    logits: torch.Tensor, specs: Sequence[SampleSpec], token_ids: Sequence[int]
) -> list[TokenLogprob | None] | None:
    """Of each row's token, None where it is not asked for; None if no row asks. `logits` as in `token_logprobs`."""
    wanted = [
        (row, spec.params.logprobs) for row, spec in enumerate(specs) if spec.params.logprobs is not None
    ]
    if not wanted:
        return None
    rows = [row for row, _ in wanted]
    found = token_logprobs(logits[rows], [token_ids[row] for row in rows], [num_top for _, num_top in wanted])
    logprobs: list[TokenLogprob | None] = [None] * len(specs)
    for row, logprob in zip(rows, found, strict=True):
        logprobs[row] = logprob
    return logprobs


def prompt_logprobs(
    hidden: torch.Tensor, score: ScoreSpec, to_logits: Callable[[torch.Tensor], torch.Tensor]
) -> list[TokenLogprob]:
    """Of the tokens that `score` asks for. `hidden`: all rows of the chunk; `to_logits` is applied to a few a time."""
    logprobs: list[TokenLogprob] = []
    for start in range(0, len(score.target_ids), ROWS_AT_ONCE):
        target_ids = score.target_ids[start : start + ROWS_AT_ONCE]
        first_row = score.first_row + start
        logits = to_logits(hidden[first_row : first_row + len(target_ids)])
        logprobs += token_logprobs(logits, target_ids, [score.num_top] * len(target_ids))
    return logprobs


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob]:
    """Per row of `logits`, float32 [rows, vocab_size]: its token's, with so many of the likeliest tokens.

    Both come from the same numbers, so a token's two log probabilities are equal to the last bit.
    """
    logprobs = logits - logits.logsumexp(dim=-1, keepdim=True)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    tops = _likeliest(logprobs, min(max(num_top), logprobs.shape[1]))
    return [
        TokenLogprob(token_id, logprob, top[:count])
        for token_id, logprob, top, count in zip(token_ids, chosen, tops, num_top, strict=True)
    ]


def _likeliest(logprobs: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` likeliest tokens of each row, or more if some are as likely as the last; equals by id."""
    tops: list[list[tuple[int, float]]] = [[] for _ in range(len(logprobs))]
    if count == 0:
        return tops
    lowest = logprobs.topk(count, dim=-1).values[:, -1:]
    rows, token_ids = (logprobs >= lowest).nonzero(as_tuple=True)  # token ids ascend within a row
    values = logprobs[rows, token_ids].tolist()
    for row, token_id, value in zip(rows.tolist(), token_ids.tolist(), values, strict=True):
        tops[row].append((token_id, value))
    for top in tops:
        top.sort(key=lambda entry: -entry[1])  # stable
    return tops
