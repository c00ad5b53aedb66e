"""What a scheduled engine can take, and why a request can never run on it (sans-IO)."""

from __future__ import annotations

import msgspec

from dynrt.engines.config import EngineConfig
from dynrt.engines.protocol import EngineInfo, EngineRequest
from dynrt.engines.scheduling.block_pool import BlockPool


class SchedulerLimits(msgspec.Struct, frozen=True):
    """What the model can take, and how much of it one step may compute."""

    context_length: int
    vocab_size: int | None  # None: token ids were looked at before
    eos_token_ids: frozenset[int]
    max_batch_tokens: int
    max_batch_requests: int


def limits_of(config: EngineConfig, info: EngineInfo) -> SchedulerLimits:
    """The limits of an engine set up like this."""
    return SchedulerLimits(
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        eos_token_ids=info.eos_token_ids,
        max_batch_tokens=config.max_batch_tokens,
        max_batch_requests=config.max_batch_requests,
    )


def find_refusal(request: EngineRequest, limits: SchedulerLimits, pool: BlockPool) -> str | None:
    """Why this request can never run here, naming the values; None if it can."""
    fault = find_fault(request, limits.context_length, limits.vocab_size)
    if fault is not None:
        return fault
    num_tokens = _count_kv_tokens(request)
    num_blocks = pool.blocks_for(num_tokens)
    if num_blocks > pool.num_blocks:
        return (
            f"{num_tokens} tokens need {num_blocks} KV blocks and the cache has {pool.num_blocks}: "
            f"shorten the request or raise kv_blocks"
        )
    return None


def find_fault(request: EngineRequest, context_length: int, vocab_size: int | None) -> str | None:
    """What is wrong with the request for this model, whatever its cache; `vocab_size` as in SchedulerLimits."""
    num_prompt, num_outputs = len(request.prompt_ids), len(request.output_ids)
    max_tokens = request.sampling.max_tokens
    if not num_prompt:
        return "the prompt is empty: give at least one token"
    if num_outputs >= max_tokens:
        return f"{num_outputs} output tokens were given and max_tokens is {max_tokens}: nothing is left to do"
    if num_prompt + max_tokens > context_length:
        return (
            f"{num_prompt} prompt tokens and max_tokens {max_tokens} exceed the context length of "
            f"{context_length}: shorten the prompt or lower max_tokens"
        )
    foreign_id = _find_foreign_id(request, vocab_size)
    if foreign_id is not None:
        return f"token id {foreign_id} is outside the vocabulary of {vocab_size}: use the model's tokenizer"
    return None


def _count_kv_tokens(request: EngineRequest) -> int:
    """Tokens whose KV must fit at once. The KV of the last token sampled is never computed."""
    if request.prefill_only:
        return len(request.prompt_ids) + len(request.output_ids)
    return len(request.prompt_ids) + request.sampling.max_tokens - 1


def _find_foreign_id(request: EngineRequest, vocab_size: int | None) -> int | None:
    if vocab_size is None:
        return None
    sampling = request.sampling
    biased_ids = [token_id for token_id, _ in sampling.logit_bias]
    for token_ids in (request.prompt_ids, request.output_ids, sampling.stop_token_ids, biased_ids):
        for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
            if not 0 <= token_id < vocab_size:
                return token_id
    return None
