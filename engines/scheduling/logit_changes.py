"""How one sequence's bias and penalties change the logits of which tokens, kept up token by token (sans-IO).

Penalties mean what they mean in vLLM: presence and frequency look at the output, repetition at prompt and output.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from dynrt.runtime.messages import SamplingParams


class LogitChanges:
    """Parallel arrays, one entry for each token whose logit changes, in no special order.

    A logit x becomes y = x + bias, then y / divisor if y > 0, else y * divisor, then less the deduction. What a new
    output token costs does not grow with the sequence.
    """

    def __init__(self, sampling: SamplingParams, prompt_ids: Iterable[int]) -> None:
        self._sampling = sampling
        seen = [*dict.fromkeys(prompt_ids)] if sampling.repetition_penalty != 1.0 else []
        self.token_ids = array("q", seen)
        self.biases = array("f", [0.0]) * len(seen)
        self.divisors = array("f", [sampling.repetition_penalty]) * len(seen)
        self.deductions = array("f", [0.0]) * len(seen)
        self._index = {token_id: index for index, token_id in enumerate(seen)}
        self._counts: dict[int, int] = {}  # of output tokens
        self._num_outputs = 0
        for token_id, bias in sampling.logit_bias:
            self.biases[self._index_of(token_id)] += bias

    @classmethod
    def of(cls, sampling: SamplingParams, prompt_ids: Iterable[int]) -> LogitChanges | None:
        """None for a request that asks for no changes."""
        penalties = sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty - 1.0
        return cls(sampling, prompt_ids) if any(penalties) or sampling.logit_bias else None

    def __len__(self) -> int:
        return len(self.token_ids)

    def follow(self, token_ids: Sequence[int], num_prompt: int) -> None:
        """Take in the outputs that came since the last call. `token_ids`: prompt and output so far."""
        sampling = self._sampling
        for token_id in token_ids[num_prompt + self._num_outputs :]:
            index = self._index_of(token_id)
            self._counts[token_id] = count = self._counts.get(token_id, 0) + 1
            self.divisors[index] = sampling.repetition_penalty
            self.deductions[index] = sampling.presence_penalty + count * sampling.frequency_penalty
        self._num_outputs = len(token_ids) - num_prompt

    def _index_of(self, token_id: int) -> int:
        index = self._index.setdefault(token_id, len(self.token_ids))
        if index == len(self.token_ids):
            self.token_ids.append(token_id)
            self.biases.append(0.0)
            self.divisors.append(1.0)
            self.deductions.append(0.0)
        return index
