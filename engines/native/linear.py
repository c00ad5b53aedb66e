"""Matrix products with a fixed weight."""

from __future__ import annotations

import os

import torch
import torch.nn.functional as F  # noqa: N812

_KERNELS_KEPT = 16  # those of the last three row counts: a model has up to five shapes of weights
_KERNEL_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # oneDNN's, and torch's around it


def bound_kernel_caches() -> None:
    """On CPU, keep few of oneDNN's kernels. To be called before the first product; what the user set stands.

    oneDNN generates one of about 0.5 MB for each number of rows and shape of weight, and by default keeps 1024 of
    them in each cache: batches of 1 to 512 rows of four weights took 770 MB, with this bound 15 MB. A step of a row
    count not kept costs 2 to 3 ms more: 4 to 6 % of 30 layers of a 135M model with 1 to 64 decodes.
    """
    for name in _KERNEL_CACHES:
        os.environ.setdefault(name, str(_KERNELS_KEPT))


class Linear:
    """x Wᵀ + b for x [rows, in_features].

    On CPU the weight is laid out once for oneDNN's kernels, where this torch has that private operator: bfloat16
    products of up to 8 rows take 0.3 to 0.65 of F.linear's time, larger ones 0.85 to 1 (measured on AVX512_BF16).
    """

    __slots__ = ("_bias", "_is_prepacked", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """`weight` [out_features, in_features]; `bias` [out_features]."""
        self._bias = bias
        self._weight = weight.contiguous()
        self._is_prepacked = _can_prepack(weight)
        if self._is_prepacked:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_prepacked:
            return F.linear(x, self._weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product


def _can_prepack(weight: torch.Tensor) -> bool:
    ops = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    if weight.device.type != "cpu" or not all(hasattr(torch.ops.mkldnn, op) for op in ops):
        return False
    return weight.dtype == torch.float32 or (
        weight.dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
