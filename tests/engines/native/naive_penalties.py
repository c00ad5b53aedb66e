"""Bias and penalties as their definitions read."""

from __future__ import annotations

from collections.abc import Sequence

from dynrt.runtime.messages import SamplingParams


def naive_logit(
    logit: float, token_id: int, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> float:
    logit += sum(bias for biased_id, bias in params.logit_bias if biased_id == token_id)
    if token_id in prompt or token_id in output:
        factor = params.repetition_penalty
        logit = logit / factor if logit > 0 else logit * factor
    count = output.count(token_id)
    return logit - params.frequency_penalty * count - params.presence_penalty * (count > 0)
