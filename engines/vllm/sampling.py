"""Our sampling parameters as vLLM's, and vLLM's log probabilities as ours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from vllm import SamplingParams as VllmSamplingParams
from vllm.logprobs import Logprob
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from dynrt.engines.protocol import EngineRequest
from dynrt.runtime.messages import Grammar, SamplingParams, TokenLogprob

SEEDS = 1 << 63


def sampling_of(request: EngineRequest, *, loads_prompt: bool) -> VllmSamplingParams:
    """vLLM's parameters; raises ValueError for what vLLM refuses.

    vLLM counts a request's outputs from its start here. Outputs generated elsewhere come as prompt: they are taken
    off its limits, and its seed is another one, lest the same random numbers come again. Text, and so stop strings,
    are made by our text streams. A request that loads its prompt's KV cannot tell the prompt's log probabilities.
    """
    ours = request.sampling
    num_outputs = len(request.output_ids)
    max_tokens = 1 if request.prefill_only else ours.max_tokens - num_outputs
    return VllmSamplingParams(
        max_tokens=max_tokens,
        min_tokens=max(0, min(ours.min_tokens - num_outputs, max_tokens)),
        temperature=ours.temperature,
        top_p=ours.top_p,
        top_k=ours.top_k,
        min_p=ours.min_p,
        seed=(ours.seed + num_outputs) % SEEDS,
        presence_penalty=ours.presence_penalty,
        frequency_penalty=ours.frequency_penalty,
        repetition_penalty=ours.repetition_penalty,
        logit_bias=dict(ours.logit_bias) or None,
        logprobs=ours.logprobs,
        prompt_logprobs=None if loads_prompt else ours.prompt_logprobs,
        structured_outputs=None if ours.grammar is None else _structure(ours.grammar),
        ignore_eos=ours.ignore_eos,
        stop_token_ids=list(ours.stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def token_logprob(token_id: int, position: Mapping[int, Logprob], sampling: SamplingParams) -> TokenLogprob:
    """What vLLM tells of one output position: the sampled token, and the likeliest ones if asked for.

    Of the model's raw distribution, as vLLM's own server tells it: before logit bias and penalties.
    """
    assert sampling.logprobs is not None
    return _logprob(token_id, position, sampling.logprobs)


def prompt_logprobs(
    prompt_ids: Sequence[int], positions: Sequence[Mapping[int, Logprob] | None], sampling: SamplingParams
) -> list[TokenLogprob | None]:
    """The same for each prompt token; the first one has none."""
    assert sampling.prompt_logprobs is not None
    top = sampling.prompt_logprobs
    return [
        None if position is None else _logprob(token_id, position, top)
        for token_id, position in zip(prompt_ids, positions, strict=True)
    ]


def _logprob(token_id: int, position: Mapping[int, Logprob], num_top: int) -> TokenLogprob:
    ranked = sorted((entry.rank or 0, top_id, entry.logprob) for top_id, entry in position.items())
    top = [(top_id, logprob) for rank, top_id, logprob in ranked if rank <= num_top]
    return TokenLogprob(token_id, position[token_id].logprob, top)


def _structure(grammar: Grammar) -> StructuredOutputsParams:
    match grammar.kind:
        case "json_object":
            return StructuredOutputsParams(json_object=True)
        case "json_schema":
            return StructuredOutputsParams(json=grammar.spec)
        case "regex":
            return StructuredOutputsParams(regex=grammar.spec)
        case "choice":
            return StructuredOutputsParams(choice=json.loads(grammar.spec))
        case "grammar":
            return StructuredOutputsParams(grammar=grammar.spec)
