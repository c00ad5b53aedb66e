"""Log probabilities of tokens, and the likeliest tokens beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from dynrt.engines.scheduling.batch import SampleSpec, ScoreSpec
from dynrt.runtime.messages import TokenLogprob

ROWS_AT_ONCE = 64  # of the prompt: with 49,152 tokens, 13 MB of logits and as much of their logarithms
_RUN = 256  # tokens


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
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device)[:, None])[:, 0].tolist()
    tops = _likeliest(logprobs, min(max(num_top), logprobs.shape[1]))
    return [
        TokenLogprob(token_id, logprob, top[:count])
        for token_id, logprob, top, count in zip(token_ids, chosen, tops, num_top, strict=True)
    ]


def _likeliest(logprobs: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The `count` likeliest tokens of each row, or more if some are as likely as the last; equals by id.

    They lie in the `count` runs of neighbours with the highest maxima, or in others whose maximum is as high: a
    seventh of the time of topk over the vocabulary.
    """
    tops: list[list[tuple[int, float]]] = [[] for _ in range(len(logprobs))]
    if count == 0:
        return tops
    runs = F.pad(logprobs, (0, -logprobs.shape[1] % _RUN), value=float("-inf")).view(len(logprobs), -1, _RUN)
    maxima = runs.amax(dim=-1)
    lowest = _kth_largest(runs, maxima, count)
    rows, run_ids = (maxima >= lowest).nonzero(as_tuple=True)
    candidates = runs[rows, run_ids]
    found, offsets = (candidates >= lowest[rows]).nonzero(as_tuple=True)
    token_ids = (run_ids[found] * _RUN + offsets).tolist()  # ascending within a row
    for row, token_id, value in zip(
        rows[found].tolist(), token_ids, candidates[found, offsets].tolist(), strict=True
    ):
        tops[row].append((token_id, value))
    for top in tops:
        top.sort(key=lambda entry: -entry[1])  # stable
    return tops


def _kth_largest(runs: torch.Tensor, maxima: torch.Tensor, count: int) -> torch.Tensor:
    """Of each row, [rows, 1]."""
    best = maxima.topk(min(count, maxima.shape[1]), dim=-1).indices
    candidates = runs.gather(1, best[:, :, None].expand(-1, -1, _RUN)).flatten(1)
    return candidates.topk(count, dim=-1).values[:, -1:]
