"""Rotary embedding: the rotation against complex numbers, the scalings against their definitions."""

from __future__ import annotations

import math

import pytest
import torch

from dynrt.engines.native.config import LinearScaling, Llama3Scaling, RopeConfig
from dynrt.engines.native.rope import RotaryTable, inverse_frequencies


def test_rotates_pairs_like_complex_numbers() -> None:
    frequencies = inverse_frequencies(RopeConfig(10000.0), head_size=16)
    positions = torch.tensor([0, 3, 1000])
    heads = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(0))
    turns = torch.polar(torch.ones(3, 8), positions[:, None] * frequencies)[:, None]
    expected = torch.complex(heads[..., :8], heads[..., 8:]) * turns
    rotated = RotaryTable(frequencies, positions, torch.float32).rotate(heads)
    torch.testing.assert_close(rotated, torch.cat((expected.real, expected.imag), dim=-1))


def test_scores_depend_on_the_distance_only() -> None:
    frequencies = inverse_frequencies(RopeConfig(10000.0), head_size=8)
    q, k = torch.randn(2, 1, 1, 8, generator=torch.Generator().manual_seed(0))

    def score(q_position: int, k_position: int) -> float:
        table = RotaryTable(frequencies, torch.tensor([q_position, k_position]), torch.float32)
        turned = table.rotate(torch.cat((q, k)))
        return float(turned[0, 0] @ turned[1, 0])

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_plain_frequencies() -> None:
    frequencies = inverse_frequencies(RopeConfig(100.0), head_size=4)
    torch.testing.assert_close(frequencies, torch.tensor([1.0, 0.1]))


def test_linear_scaling_divides_all_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(10000.0), head_size=64)
    scaled = inverse_frequencies(RopeConfig(10000.0, LinearScaling(4.0)), head_size=64)
    torch.testing.assert_close(scaled, plain / 4.0)


def test_llama3_scaling_keeps_fast_pairs_divides_slow_ones_and_blends_between() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192)
    plain = inverse_frequencies(RopeConfig(500000.0), head_size=128)
    scaled = inverse_frequencies(RopeConfig(500000.0, scaling), head_size=128)
    turns = plain * 8192 / (2 * math.pi)
    fast, slow = turns > 4.0, turns < 1.0
    between = ~fast & ~slow
    assert fast.any() and slow.any() and between.any()
    torch.testing.assert_close(scaled[fast], plain[fast])
    torch.testing.assert_close(scaled[slow], plain[slow] / 8.0)
    assert ((scaled < plain) & (scaled > plain / 8.0))[between].all()
    assert (scaled.diff() < 0).all()
