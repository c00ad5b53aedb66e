"""Rotary position embedding: frequencies with their scaling, one table per step, applied to q and k together."""

from __future__ import annotations

import math

import torch

from dynrt.engines.native.config import LinearScaling, Llama3Scaling, RopeConfig


class RotaryTable:
    """cos and sin of one step's positions, in the form that `rotate` multiplies with. Both [tokens, 1, head_size]."""

    __slots__ = ("cos", "signed_sin")

    def __init__(
        self, inverse_frequencies: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype
    ) -> None:
        """`inverse_frequencies` float32 [head_size / 2]; `positions` [tokens]."""
        angles = positions[:, None].float() * inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        self.cos = torch.cat((cos, cos), dim=-1)[:, None].to(dtype)
        self.signed_sin = torch.cat((-sin, sin), dim=-1)[:, None].to(dtype)

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Turn [tokens, heads, head_size]; dimension i is paired with i + head_size / 2.

        (a, b) becomes (a cos - b sin, b cos + a sin): rolling by half a head swaps a and b, and the sign is in the
        table, so no half is ever cut out and joined again.
        """
        swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
        return (heads * self.cos).addcmul_(swapped, self.signed_sin)


def inverse_frequencies(rope: RopeConfig, head_size: int) -> torch.Tensor:
    """Radians per token of each pair of dimensions, float32 [head_size / 2]."""
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32) / head_size
    frequencies = 1.0 / rope.theta**exponents
    match rope.scaling:
        case None:
            return frequencies
        case LinearScaling(factor):
            return frequencies / factor
        case Llama3Scaling():
            return _scale_llama3(frequencies, rope.scaling)


def _scale_llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """Llama 3.1's rule, by the number of turns that a pair makes within the original context.

    At most `low_freq_factor` turns: divided by `factor`. At least `high_freq_factor`: kept. Between: blended.
    """
    turns = scaling.original_context * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    kept_share = ((turns - scaling.low_freq_factor) / span).clamp(0.0, 1.0)
    return frequencies * (kept_share + (1.0 - kept_share) / scaling.factor)
