"""The parameters that chat and text completions share, and their completion once the prompt's length is known."""

from __future__ import annotations

from functools import partial
from typing import Any, get_args

import msgspec

from dynrt.runtime.errors import ContextLengthError, InvalidRequestError
from dynrt.runtime.http.fields import Fields
from dynrt.runtime.messages import SamplingParams
from dynrt.runtime.requests import LocalPrefill, ModelCard

MAX_CHOICES = 128  # of all prompts of a request together
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_NAME_CHARS = 256
MAX_SALT_CHARS = 128
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_UINT32 = 2**32 - 1


class Parameters(msgspec.Struct, frozen=True):
    """What a body asks for beside its prompt, each value within its own limits."""

    model: str  # empty: the one model served
    stream: bool
    include_usage: bool  # in a stream: as a last chunk
    continuous_usage: bool  # in a stream: in each chunk
    max_tokens: int | None  # None: not asked for
    max_tokens_param: str  # the name under which it was asked for
    sampling: partial[SamplingParams]  # lacks max_tokens only
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    seeded: bool
    n: int  # choices for each prompt
    salt: str
    local_prefill: LocalPrefill | None


def read_parameters(fields: Fields) -> Parameters:
    """Read the shared parameters; problems are left with `fields`."""
    stream = fields.boolean("stream", False)
    options = _stream_options(fields, stream)
    newer = fields.integer("max_completion_tokens", None, 1)
    older = fields.integer("max_tokens", None, 1)
    min_tokens = fields.integer("min_tokens", 0, 0, MAX_INT32)
    stop_token_ids = _stop_token_ids(fields)
    return Parameters(
        model=fields.string("model", "", MAX_NAME_CHARS),
        stream=stream,
        include_usage=options.boolean("include_usage", False),
        continuous_usage=options.boolean("continuous_usage_stats", False),
        max_tokens=older if newer is None else newer,
        max_tokens_param="max_tokens" if newer is None else "max_completion_tokens",
        sampling=_sampling(fields, min_tokens, stop_token_ids),
        min_tokens=min_tokens,
        stop_token_ids=stop_token_ids,
        seeded=fields.values.get("seed") is not None,
        n=fields.integer("n", 1, 1, MAX_CHOICES),
        salt=fields.string("cache_salt", "", MAX_SALT_CHARS),
        local_prefill=_local_prefill(fields),
    )


def _sampling(fields: Fields, min_tokens: int, stop_token_ids: tuple[int, ...]) -> partial[SamplingParams]:
    top_p = fields.number("top_p", 1.0, 0.0, 1.0)
    top_k = max(0, fields.integer("top_k", 0, -1, MAX_INT32))
    return partial(
        SamplingParams,
        temperature=fields.number("temperature", 1.0, 0.0, 2.0),
        top_p=top_p or 1.0,
        top_k=top_k if top_p else 1,  # OpenAI takes top_p 0: the smallest set there is, the top token alone
        seed=fields.integer("seed", 0, -MAX_INT64 - 1, MAX_INT64),
        min_tokens=min_tokens,
        ignore_eos=fields.boolean("ignore_eos", False),
        stop=_stop(fields),
        stop_token_ids=stop_token_ids,
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output", False),
    )


def _stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.values.get("stop")
    if stop is None:
        return ()
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list) or len(strings) > MAX_STOPS:
        fields.refuse("stop", f"it must be a string or a list of up to {MAX_STOPS} strings")
    elif not all(isinstance(one, str) and 1 <= len(one) <= MAX_STOP_CHARS for one in strings):
        fields.refuse(
            "stop", f"it must have strings of 1 to {MAX_STOP_CHARS} characters; leave out empty ones"
        )
    else:
        return tuple(strings)
    return ()


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.values.get("stop_token_ids")
    if ids is None:
        return ()
    if isinstance(ids, list) and len(ids) <= MAX_STOP_TOKEN_IDS and are_token_ids(ids):
        return tuple(ids)
    fields.refuse(
        "stop_token_ids", f"it must be a list of up to {MAX_STOP_TOKEN_IDS} token ids, none negative"
    )
    return ()


def are_token_ids(values: list[Any]) -> bool:
    """Whether all are integers that fit a packed prompt. No Python per value: a body may have millions."""
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_UINT32)


def _stream_options(fields: Fields, stream: bool) -> Fields:
    if fields.values.get("stream_options") is not None and not stream:
        fields.refuse("stream_options", "it must be left out, or stream be true")
    return fields.child("stream_options")


def _local_prefill(fields: Fields) -> LocalPrefill | None:
    """The `dynrt` extension: {"local_prefill": "auto" | "never" | "always"}, for tests and benches."""
    extension = fields.child("dynrt")
    for name in extension.values:
        if name != "local_prefill":
            extension.refuse(name, "it must be left out: dynrt has no field but local_prefill")
    choice = extension.values.get("local_prefill")
    if choice is None or choice in get_args(LocalPrefill):
        return choice
    extension.refuse("local_prefill", 'it must be "auto", "never" or "always"')
    return None


def complete_sampling(
    asked: Parameters,
    card: ModelCard,
    prompt_tokens: int,
    *,
    prompt_param: str,
    default_max_tokens: int | None,
) -> SamplingParams:
    """`asked.sampling` with max_tokens; `default_max_tokens` None means the rest of the context.

    Raises ContextLengthError if prompt and max_tokens do not fit, InvalidRequestError for what only the model
    or max_tokens can tell to be wrong.
    """
    room = _room(card, prompt_tokens, prompt_param)
    if asked.max_tokens is not None and asked.max_tokens > room:
        raise ContextLengthError(
            f"{asked.max_tokens_param} is {asked.max_tokens} and the prompt has {prompt_tokens} tokens, but the"
            f" context of {card.name} is {card.context_length} tokens: {asked.max_tokens_param} can be at most {room}",
            param=asked.max_tokens_param,
        )
    max_tokens = asked.max_tokens or min(room, default_max_tokens or room)
    if asked.min_tokens > max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {asked.min_tokens}, but the answer is limited to {max_tokens} tokens;"
            f" lower min_tokens or set a larger max_tokens (at most {room} for this prompt)",
            param="min_tokens",
        )
    check_vocabulary(asked.stop_token_ids, card, "stop_token_ids")
    return asked.sampling(max_tokens=max_tokens)


def _room(card: ModelCard, prompt_tokens: int, prompt_param: str) -> int:
    """How many tokens can follow the prompt: at least one."""
    if prompt_tokens == 0:
        raise InvalidRequestError("the prompt has no tokens; it needs at least 1", param=prompt_param)
    room = card.context_length - prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"the prompt has {prompt_tokens} tokens, but the context of {card.name} is {card.context_length} tokens,"
            f" prompt and answer together: shorten the prompt to at most {card.context_length - 1} tokens",
            param=prompt_param,
        )
    return room


def check_vocabulary(token_ids: list[int] | tuple[int, ...], card: ModelCard, param: str) -> None:
    """Raise InvalidRequestError if an id is not one of the model's."""
    largest = max(token_ids, default=0)
    if largest >= card.vocab_size:
        raise InvalidRequestError(
            f"{param} has the token id {largest}, but the ids of {card.name} go from 0 to {card.vocab_size - 1}",
            param=param,
        )
