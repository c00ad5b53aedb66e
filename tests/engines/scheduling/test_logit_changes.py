"""LogitChanges: kept up in any steps, equal to what the whole output says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynrt.engines.scheduling.logit_changes import LogitChanges
from dynrt.runtime.messages import SamplingParams

TOKEN_IDS = st.lists(st.integers(0, 9), max_size=30)
PENALTIES = st.sampled_from([-2.0, 0.0, 0.5, 2.0])  # these and their multiples are exact in float32
SAMPLING = st.builds(
    SamplingParams,
    st.just(1),
    presence_penalty=PENALTIES,
    frequency_penalty=PENALTIES,
    repetition_penalty=st.sampled_from([0.5, 1.0, 2.0]),
    logit_bias=st.lists(st.tuples(st.integers(0, 9), st.sampled_from([-100.0, 3.0])), max_size=3).map(tuple),
)
Change = tuple[float, float, float]  # bias, divisor, deduction
NO_CHANGE: Change = (0.0, 1.0, 0.0)


def expected_change(
    sampling: SamplingParams, prompt_ids: Sequence[int], output_ids: Sequence[int], token_id: int
) -> Change:
    """By counting."""
    bias = sum(bias for biased_id, bias in sampling.logit_bias if biased_id == token_id)
    is_repeated = token_id in prompt_ids or token_id in output_ids
    count = output_ids.count(token_id)
    deduction = count * sampling.frequency_penalty + (count > 0) * sampling.presence_penalty
    return bias, sampling.repetition_penalty if is_repeated else 1.0, deduction


@given(SAMPLING, TOKEN_IDS, TOKEN_IDS, st.lists(st.integers(0, 30), max_size=4))
def test_equal_to_counting_however_the_output_comes(
    sampling: SamplingParams, prompt_ids: list[int], output_ids: list[int], cuts: list[int]
) -> None:
    changes = LogitChanges.of(sampling, prompt_ids)
    expected = [expected_change(sampling, prompt_ids, output_ids, token_id) for token_id in range(10)]
    if changes is None:
        assert expected == [NO_CHANGE] * 10
        return
    for end in [*sorted(cuts), len(output_ids)]:
        if end <= len(output_ids):
            changes.follow([*prompt_ids, *output_ids[:end]], len(prompt_ids))
    values = zip(changes.biases, changes.divisors, changes.deductions, strict=True)
    found = dict(zip(changes.token_ids, values, strict=True))
    assert len(found) == len(changes), "a token has one entry"
    assert [found.get(token_id, NO_CHANGE) for token_id in range(10)] == expected


@pytest.mark.parametrize("options", [{}, {"temperature": 0.3, "min_p": 0.1, "logprobs": 3}], ids=str)
def test_requests_that_ask_for_no_changes_have_none(options: dict[str, Any]) -> None:
    assert LogitChanges.of(SamplingParams(8, **options), [1, 2, 3]) is None
