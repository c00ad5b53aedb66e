"""What is wrong with a request's prompt, whatever engines there are."""

from __future__ import annotations

import numpy as np

from dynrt.runtime.errors import ContextLengthError, InvalidRequestError
from dynrt.runtime.messages import unpack_ids
from dynrt.runtime.requests import GenerateRequest, ModelCard

FEW_TOKENS = 96  # looked through by the time that numpy has begun; of many, it does 200 at a time


def check_prompt(request: GenerateRequest, card: ModelCard) -> None:
    """Raises InvalidRequestError, ContextLengthError if it is too long for the model."""
    context_length = card.context_length
    num_tokens, cut_bytes = divmod(len(request.prompt_ids), 4)
    if cut_bytes:
        raise InvalidRequestError(
            f"prompt_ids has {len(request.prompt_ids)} bytes, no multiple of 4; pack ids with messages.pack_ids",
            param="prompt",
        )
    if num_tokens == 0:
        raise InvalidRequestError("the prompt is empty; it needs at least one token", param="prompt")
    max_tokens = request.sampling.max_tokens
    if max_tokens < 1:
        raise InvalidRequestError(f"max_tokens is {max_tokens}; at least 1", param="max_tokens")
    if num_tokens + max_tokens > context_length:
        raise ContextLengthError(
            f"the prompt has {num_tokens} tokens and max_tokens is {max_tokens}, together more than the context "
            f"of {context_length} tokens; {max(0, context_length - num_tokens)} would fit behind this prompt",
            param="max_tokens" if num_tokens < context_length else "prompt",
        )
    highest = _highest(request.prompt_ids, num_tokens)
    if highest >= card.vocab_size:
        raise InvalidRequestError(
            f"token id {highest} is not in the vocabulary; ids go from 0 to {card.vocab_size - 1}",
            param="prompt",
        )


def _highest(prompt_ids: bytes, num_tokens: int) -> int:
    if num_tokens <= FEW_TOKENS:
        return max(unpack_ids(prompt_ids))
    return int(np.frombuffer(prompt_ids, "<u4").max())
