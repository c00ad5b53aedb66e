"""Log probabilities against sorting everything, with as many equals as bfloat16 models have."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrt.engines.native.logprobs import ROWS_AT_ONCE, prompt_logprobs, sampled_logprobs, token_logprobs
from dynrt.engines.scheduling.batch import SampleSpec, ScoreSpec
from dynrt.runtime.messages import SamplingParams


def some_logits(seed: int, rows: int, vocab_size: int, spread: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (spread * torch.randn(rows, vocab_size, generator=generator)).bfloat16().float()


@settings(max_examples=60)
@given(
    st.integers(0, 10**6),
    st.sampled_from([1, 3, 255, 256, 2000]),
    st.sampled_from([0.0, 0.1, 3.0]),
    st.data(),
)
def test_equal_to_sorting_all(seed: int, vocab_size: int, spread: float, data: st.DataObject) -> None:
    logits = some_logits(seed, 3, vocab_size, spread)
    token_ids = [data.draw(st.integers(0, vocab_size - 1)) for _ in range(3)]
    num_top = [data.draw(st.integers(0, 25)) for _ in range(3)]
    found = token_logprobs(logits, token_ids, num_top)
    for row, logprob in enumerate(found):
        exact = logits[row].double().log_softmax(dim=-1).tolist()
        assert logprob.token_id == token_ids[row]
        assert logprob.logprob == pytest.approx(exact[token_ids[row]], abs=1e-5)
        order = sorted(range(vocab_size), key=lambda i: (-exact[i], i))
        assert [token_id for token_id, _ in logprob.top] == order[: num_top[row]]
        assert [value for _, value in logprob.top] == pytest.approx(
            [exact[i] for i, _ in logprob.top], abs=1e-5
        )
        assert dict(logprob.top).get(token_ids[row], logprob.logprob) == logprob.logprob, "the same float"


def test_rows_that_do_not_ask_get_none() -> None:
    logits = some_logits(1, 3, 50)
    specs = [SampleSpec(SamplingParams(1, logprobs=count), 0) for count in (None, 2, 0)]
    assert sampled_logprobs(logits, specs[:1], [4]) is None
    found = sampled_logprobs(logits, specs, [4, 5, 6])
    assert found is not None and found[0] is None
    assert found[1:] == token_logprobs(logits[1:], [5, 6], [2, 0])


def test_prompts_are_scored_a_few_rows_at_a_time() -> None:
    hidden = some_logits(2, ROWS_AT_ONCE * 2 + 9, 30)
    rng = random.Random(0)
    target_ids = [rng.randrange(30) for _ in range(ROWS_AT_ONCE * 2 + 3)]
    sizes: list[int] = []

    def to_logits(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return 2 * rows

    found = prompt_logprobs(hidden, ScoreSpec(4, target_ids, 3), to_logits)
    assert sizes == [ROWS_AT_ONCE, ROWS_AT_ONCE, 3]
    assert found == token_logprobs(2 * hidden[4 : 4 + len(target_ids)], target_ids, [3] * len(target_ids))
