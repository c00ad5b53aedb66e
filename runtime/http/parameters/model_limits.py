"""Completes what a request asks for with what only its model can tell: the room in the context, the vocabulary."""

from __future__ import annotations

from collections.abc import Iterable

from dynrt.runtime.errors import ContextLengthError, InvalidRequestError
from dynrt.runtime.http.backend import Backend
from dynrt.runtime.http.parameters.fields import Fields
from dynrt.runtime.http.parameters.grammars import check_grammar
from dynrt.runtime.http.parameters.shared import WHAT_FITS, Parameters
from dynrt.runtime.messages import SamplingParams
from dynrt.runtime.requests import ModelCard

# by these very words, OpenAI's and Anthropic's, litellm and LangChain know that another model may help
CONTEXT = "this model's maximum context length is"
TOO_LONG = "the prompt is too long"


async def check_for_model(asked: Parameters, card: ModelCard) -> None:
    """Raises InvalidRequestError if the model has no such tokens, or cannot follow the grammar."""
    if "stop_token_ids" in asked.sampling:
        check_vocabulary(asked.sampling["stop_token_ids"], card, "stop_token_ids")
    if "logit_bias" in asked.sampling:
        check_vocabulary([token_id for token_id, _ in asked.sampling["logit_bias"]], card, "logit_bias")
    if asked.grammar is not None:
        await check_grammar(asked.grammar, card)


def special_tokens(asked: Parameters, backend: Backend) -> tuple[str, ...]:
    """Those that are to be shown because all are."""
    return tuple(backend.token_bytes().special_tokens.values()) if asked.shows_special_tokens else ()


def complete_sampling(
    asked: Parameters,
    card: ModelCard,
    prompt_tokens: int,
    shown_special_tokens: tuple[str, ...],
    *,
    fields: Fields,
    prompt_name: str,
    default_max_tokens: int | None,
) -> SamplingParams:
    """What is asked for, with max_tokens; `default_max_tokens` None means the rest of the context.

    `fields`, `prompt_name`: what was read, and where in it the prompt was, for errors.

    Raises ContextLengthError if prompt and max_tokens do not fit, InvalidRequestError if min_tokens do not.
    """
    room = card.context_length - prompt_tokens
    if prompt_tokens == 0 or room < 1:
        raise _no_room(card, prompt_tokens, fields.param(prompt_name))
    if asked.max_tokens is not None and asked.max_tokens > room:
        param = fields.param(asked.max_tokens_name)
        raise ContextLengthError(
            f"{param} is {asked.max_tokens} and the prompt has {prompt_tokens} tokens, but"
            f" {CONTEXT} {card.context_length} tokens: {param} can be at most {room}",
            param=param,
        )
    # engines make at least one token; of a request for none it is dropped
    max_tokens = (
        min(room, default_max_tokens or room) if asked.max_tokens is None else max(1, asked.max_tokens)
    )
    sampling = SamplingParams(
        max_tokens=max_tokens,
        grammar=None if asked.grammar is None else asked.grammar.grammar,
        shown_special_tokens=shown_special_tokens,
        **asked.sampling,
    )
    if sampling.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {sampling.min_tokens}, but the answer is limited to {max_tokens} tokens;"
            f" lower min_tokens or set a larger max_tokens (at most {room} for this prompt)",
            param="min_tokens",
        )
    return sampling


def truncated(
    prompt_ids: bytes, asked: Parameters, card: ModelCard, *, default_max_tokens: int | None
) -> bytes:
    """The tokens of a prompt (packed) that are to be used."""
    if asked.truncation is None:
        return prompt_ids
    keep = asked.truncation.tokens
    if keep == WHAT_FITS:
        keep = max(1, card.context_length - (asked.max_tokens or default_max_tokens or 1))
    return prompt_ids[-4 * keep :] if asked.truncation.side == "left" else prompt_ids[: 4 * keep]


def _no_room(card: ModelCard, prompt_tokens: int, param: str) -> InvalidRequestError:
    """Of a prompt without tokens, or of one behind which no token fits."""
    if prompt_tokens == 0:
        return InvalidRequestError("the prompt has no tokens; it needs at least 1", param=param)
    return ContextLengthError(
        f"{TOO_LONG}: it has {prompt_tokens} tokens, but {CONTEXT} {card.context_length} tokens, prompt and"
        f" answer together; shorten the prompt to at most {card.context_length - 1} tokens",
        param=param,
    )


def check_vocabulary(token_ids: Iterable[int], card: ModelCard, param: str) -> None:
    """Raise InvalidRequestError if an id is not one of the model's."""
    largest = max(token_ids, default=0)
    if largest >= card.vocab_size:
        raise InvalidRequestError(
            f"{param} has the token id {largest}, but the ids of {card.name} go from 0 to {card.vocab_size - 1}",
            param=param,
        )
