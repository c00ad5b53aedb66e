"""Bias and penalties on a batch's logits, against plain arithmetic."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_penalties import naive_logit

from dynrt.engines.native.logits import changed
from dynrt.engines.native.sampler import sample
from dynrt.engines.scheduling.batch import SampleSpec
from dynrt.engines.scheduling.logit_changes import LogitChanges
from dynrt.runtime.messages import SamplingParams

VOCAB = 40


def random_params(rng: random.Random) -> SamplingParams:
    options: dict[str, Any] = {}
    if rng.random() < 0.7:
        options = {
            "presence_penalty": rng.choice([0.0, 0.7, -2.0]),
            "frequency_penalty": rng.choice([0.0, 0.3, -1.0]),
            "repetition_penalty": rng.choice([1.0, 1.3, 0.6]),
            "logit_bias": tuple(
                (rng.randrange(VOCAB), rng.uniform(-9, 9)) for _ in range(rng.choice([0, 3]))
            ),
        }
    return SamplingParams(1, **options)


def random_ids(rng: random.Random) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(rng.randrange(30))]


def spec_of(params: SamplingParams, prompt_ids: list[int], output_ids: list[int]) -> SampleSpec:
    changes = LogitChanges.of(params, prompt_ids)
    if changes is not None:
        changes.follow([*prompt_ids, *output_ids], len(prompt_ids))
    return SampleSpec(params, len(output_ids), changes=changes)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_equal_to_plain_arithmetic_and_each_row_by_itself(rng: random.Random) -> None:
    cases = [(random_params(rng), random_ids(rng), random_ids(rng)) for _ in range(4)]
    specs = [spec_of(*case) for case in cases]
    logits = 4 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
    before = logits.clone()
    result = changed(logits, specs)
    assert torch.equal(logits, before)
    for row, case in enumerate(cases):
        expected = [naive_logit(float(logits[row, i]), i, *case) for i in range(VOCAB)]
        assert result[row].tolist() == pytest.approx(expected, abs=1e-4)
        assert torch.equal(changed(logits[row : row + 1], specs[row : row + 1])[0], result[row])


@pytest.mark.parametrize("penalty", [1e-300, 1e-38, 1e38, 1e300])
def test_odd_penalties_stay_finite(penalty: float) -> None:
    logits = torch.linspace(-20.0, 20.0, VOCAB + 1)[None]
    logits[0, 0] = 0.0
    spec = spec_of(SamplingParams(1, repetition_penalty=penalty), [*range(VOCAB)], [])
    result = changed(logits, [spec])
    assert result.isfinite().all() and result.log_softmax(dim=-1).isfinite().all()
    assert 0 <= sample(result, [spec])[0] <= VOCAB


def test_without_changes_nothing_is_computed() -> None:
    logits = torch.randn(2, VOCAB)
    first_token = spec_of(SamplingParams(1, presence_penalty=1.0), [1, 2], [])
    assert changed(logits, [SampleSpec(SamplingParams(1), 0), first_token]) is logits
