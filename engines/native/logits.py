"""Logit bias and penalties, over a whole batch at once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch

from dynrt.engines.scheduling.batch import SampleSpec

_HIGHEST = (
    1e30  # so that no request's penalties, however odd, make infinities, which would end its whole batch
)


def changed(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> torch.Tensor:
    """`logits`, float32 [rows, vocab_size], with each row's changes (see LogitChanges); itself if there are none."""
    rows = [
        (row, spec.changes) for row, spec in enumerate(specs) if spec.changes is not None and spec.changes
    ]
    if not rows:
        return logits
    all_changes = [changes for _, changes in rows]
    lengths = torch.tensor([len(changes) for changes in all_changes])
    row_ids = torch.tensor([row for row, _ in rows]).repeat_interleave(lengths).to(logits.device)
    token_ids = _joined((changes.token_ids for changes in all_changes), torch.int64, logits.device)
    biases, divisors, deductions = (
        _joined((getattr(changes, name) for changes in all_changes), torch.float32, logits.device)
        for name in ("biases", "divisors", "deductions")
    )
    flat, index = (
        logits.view(-1),
        row_ids * logits.shape[1] + token_ids,
    )  # 10 times as fast as by row and token
    biased = flat.index_select(0, index) + biases
    repelled = torch.where(biased > 0.0, biased / divisors, biased * divisors)
    bounded = (repelled - deductions).nan_to_num_(nan=0.0).clamp_(-_HIGHEST, _HIGHEST)
    return flat.scatter(0, index, bounded).view_as(logits)


def _joined(
    arrays: Iterable[array[int] | array[float]], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    return torch.frombuffer(bytearray().join(arrays), dtype=dtype).to(device)
