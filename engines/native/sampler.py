"""Chooses the next token of each sequence: a pure function of its logits, its parameters and its position.

No generator keeps state between steps and nothing depends on the other rows of the batch, so a request that moves
to another worker, or is preempted and computed again, goes on with the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.nn.functional as F  # noqa: N812

from dynrt.engines.scheduling.batch import SampleSpec

_GREEDY_BELOW_TEMPERATURE = 1e-5  # here sampling has become greedy, and 1 / temperature not yet infinite
_RUN = 256  # tokens whose weights are summed before runs are compared
_PREFIX_WIDTHS = (128, 1024)  # how many of the largest logits are looked at before all are sorted


def sample(
    logits: torch.Tensor, specs: Sequence[SampleSpec], allowed: Mapping[int, bytes] = MappingProxyType({})
) -> list[int]:
    """One token id per row of `logits`, float32 [rows, vocab_size], which stays as it is.

    `logits` are final: bias and penalties are in them. Order of filters: banned ids, temperature, top_k, min_p,
    top_p. Tokens as likely as the last one kept are kept too, so that the choice never hangs on the order in which
    a kernel happens to sort equals. `allowed`: rows that a grammar rules, and a bit for each token it allows (lowest
    first), which stands instead of their banned ids.
    """
    assert logits.shape[0] == len(specs), f"{logits.shape[0]} rows for {len(specs)} specs"
    banned = [(row, i) for row, spec in enumerate(specs) if row not in allowed for i in spec.banned_ids]
    logits = _without_banned(_only_allowed(logits, allowed), banned)
    greedy = [row for row, spec in enumerate(specs) if _is_greedy(spec)]
    drawn = [row for row, spec in enumerate(specs) if not _is_greedy(spec)]
    tokens = dict(zip(greedy, _rows(logits, greedy).argmax(dim=-1).tolist(), strict=True)) if greedy else {}
    if drawn:
        tokens |= zip(drawn, _draw(_rows(logits, drawn), [specs[row] for row in drawn]), strict=True)
    return [tokens[row] for row in range(len(specs))]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), the same for the same arguments on every machine: the top 53 bits of a hash of both."""
    digest = hashlib.blake2b(b"%d:%d" % (seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _is_greedy(spec: SampleSpec) -> bool:
    params = spec.params
    return params.temperature < _GREEDY_BELOW_TEMPERATURE or params.top_p == 0.0 or params.top_k == 1


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These rows; the tensor itself if these are all."""
    return logits if len(rows) == logits.shape[0] else logits[rows]


def _only_allowed(logits: torch.Tensor, allowed: Mapping[int, bytes]) -> torch.Tensor:
    if not allowed:
        return logits
    packed = torch.frombuffer(bytearray().join(allowed.values()), dtype=torch.uint8).to(logits.device)
    powers = 1 << torch.arange(8, dtype=torch.uint8, device=logits.device)
    bits = packed.view(len(allowed), -1, 1).bitwise_and(powers).flatten(1)[:, : logits.shape[1]]
    rows = torch.tensor([*allowed], device=logits.device)
    return logits.index_put((rows,), logits[rows].masked_fill(bits == 0, float("-inf")))


def _without_banned(logits: torch.Tensor, banned: Sequence[tuple[int, int]]) -> torch.Tensor:
    """`banned`: pairs of row and token id."""
    if not banned:
        return logits
    rows, token_ids = torch.tensor(banned, device=logits.device).unbind(dim=1)
    minus_infinity = torch.tensor(float("-inf"), device=logits.device)
    return logits.index_put((rows, token_ids), minus_infinity)


def _draw(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[int]:
    temperatures = torch.tensor([spec.params.temperature for spec in specs], device=logits.device)
    scaled = torch.sub(logits, logits.amax(dim=-1, keepdim=True)).div_(temperatures[:, None])
    _keep_top_k(scaled, [spec.params.top_k for spec in specs])
    weights = scaled.exp_()
    _keep_min_p(weights, [spec.params.min_p for spec in specs])
    _keep_top_p(weights, [spec.params.top_p for spec in specs])
    return _invert_cdf(weights, [uniform(spec.params.seed, spec.position) for spec in specs])


def _keep_top_k(scaled: torch.Tensor, top_k: list[int]) -> None:
    """Set everything below the row's k-th largest value to -inf, in place; k of 0 keeps all."""
    limits = {k for k in top_k if 0 < k < scaled.shape[1]}
    if not limits:
        return
    lowest = torch.full((len(top_k), 1), float("-inf"), device=scaled.device)
    for k in limits:
        rows = [row for row, row_k in enumerate(top_k) if row_k == k]
        lowest[rows] = _rows(scaled, rows).topk(k, dim=-1).values[:, -1:]
    scaled.masked_fill_(scaled < lowest, float("-inf"))


def _keep_min_p(weights: torch.Tensor, min_p: list[float]) -> None:
    """Set weights below the row's p to 0, in place; the likeliest token's is 1."""
    if any(min_p):
        lowest = torch.tensor(min_p, device=weights.device)[:, None]
        weights.masked_fill_(weights < lowest, 0.0)


def _keep_top_p(weights: torch.Tensor, top_p: list[float]) -> None:
    """Set, in place, the weights outside the smallest set of largest ones whose share of the sum is at least p to 0.

    That set nearly always lies within the few largest; only rows where it does not are looked at in greater width.
    """
    undecided = [row for row, p in enumerate(top_p) if p < 1.0]
    if not undecided:
        return
    shares = torch.tensor(top_p, dtype=torch.float64, device=weights.device)[:, None]
    sums = shares * _run_sums(_runs(weights)).sum(dim=-1, keepdim=True)
    lowest = torch.zeros((len(top_p), 1), device=weights.device)
    for width in (*_PREFIX_WIDTHS, weights.shape[1]):
        largest = _rows(weights, undecided).topk(min(width, weights.shape[1]), dim=-1).values
        reached = largest.cumsum(dim=-1, dtype=torch.float64) >= _rows(sums, undecided)
        # argmax finds the first that reaches the sum; where none does yet, the smallest of these is too high a limit
        lowest[undecided] = largest.gather(1, reached.int().argmax(dim=-1, keepdim=True))
        undecided = [row for row, done in zip(undecided, reached[:, -1].tolist(), strict=True) if not done]
        if not undecided:
            break
    lowest[undecided] = 0.0  # p so close to 1 that the sum of all, rounded, falls short of it
    weights.masked_fill_(weights < lowest, 0.0)


def _runs(weights: torch.Tensor) -> torch.Tensor:
    """The weights in runs of _RUN neighbours, [rows, runs, _RUN], the last run filled up with 0."""
    return F.pad(weights, (0, -weights.shape[1] % _RUN)).view(len(weights), -1, _RUN)


def _run_sums(runs: torch.Tensor) -> torch.Tensor:
    """Float64 [rows, runs].

    A sum over the whole vocabulary is split differently between threads for one row than for many; one over a run
    never is, and so a row's sums are the same in any batch.
    """
    return runs.sum(dim=-1, dtype=torch.float64)


def _invert_cdf(weights: torch.Tensor, uniforms: list[float]) -> list[int]:
    """The token in each row, in order of ids, at which the running sum first exceeds `uniform` times the sum.

    Found in two steps, first the run and then the token in it. A token of weight 0 is never chosen.
    """
    runs = _runs(weights)
    run_sums = _run_sums(runs)
    cumulative = run_sums.cumsum(dim=-1)
    target = torch.tensor(uniforms, dtype=torch.float64, device=weights.device)[:, None] * cumulative[:, -1:]
    run = _first_above(cumulative, target)
    before = cumulative.gather(1, run) - run_sums.gather(1, run)
    within = runs.gather(1, run[:, :, None].expand(-1, 1, _RUN))[:, 0].cumsum(dim=-1, dtype=torch.float64)
    offset = _first_above(within, (target - before).clamp_(min=0.0))
    return (run * _RUN + offset)[:, 0].tolist()


def _first_above(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Index of the first running sum over `target`, both float64; [rows, 1]. Rounding may not lift it past the end."""
    highest = torch.nextafter(cumulative[:, -1:], torch.zeros_like(target))
    return torch.searchsorted(cumulative, torch.minimum(target, highest), right=True)
