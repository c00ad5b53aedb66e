"""The parameters that chat and text completions share: how to answer, for whom, and what else to tell."""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from dynrt.runtime.http.parameters.fields import Fields
from dynrt.runtime.http.parameters.grammars import GRAMMAR, AskedGrammar, asked_grammar
from dynrt.runtime.http.parameters.request_schema import Parameter, boolean, integer, string
from dynrt.runtime.http.parameters.sampling import MAX_INT32, MAX_LOGPROBS, SAMPLING, read_sampling
from dynrt.runtime.requests import LocalPrefill

MAX_CHOICES = 128  # of all prompts of a request together
MAX_NAME_CHARS = 256
MAX_SALT_CHARS = 128
WHAT_FITS = -1  # as truncate_prompt_tokens


class Truncation(msgspec.Struct, frozen=True):
    """Which of a prompt's tokens are used where there are more."""

    tokens: int  # so many; WHAT_FITS: those that leave room for the answer
    side: Literal["left", "right"]  # where the others are cut off


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class Parameters(msgspec.Struct, frozen=True):
    """What a body asks for beside its prompt, each value within its own limits."""

    model: str  # empty: the one model served
    stream: bool
    include_usage: bool  # in a stream: as a last chunk
    continuous_usage: bool  # in a stream: in each chunk
    n: int  # choices for each prompt
    max_tokens: int | None  # None: not asked for; 0: only the prompt is wanted back
    max_tokens_name: Literal["max_tokens", "max_completion_tokens"]  # under which it was asked for
    sampling: dict[str, Any]  # of SamplingParams, what is given but for max_tokens and grammar
    grammar: AskedGrammar | None
    shows_special_tokens: bool
    shows_token_ids: bool
    prompt_logprobs: int | None  # to be told beside those of an echo
    truncation: Truncation | None
    seeded: bool
    salt: str
    priority: int
    local_prefill: LocalPrefill | None


def read_parameters(
    fields: Fields,
    values: dict[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echo_logprobs: int | None = None,
) -> Parameters:
    """What `values`, those of ANSWERING, and the parameters of sampling say together; problems are left with `fields`.

    `logprobs`, `echo_logprobs`: how many alternatives per token of the answer, of the prompt; None: no log
    probabilities. Each endpoint has its own parameters for them, and for `max_tokens`.
    """
    n, options, prompt_logprobs = values["n"], values["stream_options"], values["prompt_logprobs"]
    cut_to, newer = values["truncate_prompt_tokens"], values["max_completion_tokens"]
    if values["best_of"] > n:  # choices are not ranked, so only as many as are returned can be asked for
        fields.refuse("best_of", f"it must be at most n, which is {n}: no choice is made and then dropped")
    if prompt_logprobs is not None and values["stream"]:
        fields.refuse("prompt_logprobs", "it must be left out of streams; set stream to false")
    sampling = read_sampling(fields)
    if logprobs is not None:
        sampling["logprobs"] = logprobs
    if prompt_logprobs is not None or echo_logprobs is not None:
        sampling["prompt_logprobs"] = max(prompt_logprobs or 0, echo_logprobs or 0)
    return Parameters(
        model=values["model"],
        stream=values["stream"],
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        n=n,
        max_tokens=max_tokens if newer is None else newer,
        max_tokens_name="max_tokens" if newer is None else "max_completion_tokens",
        sampling=sampling,
        grammar=asked_grammar(fields, values),
        shows_special_tokens=not values["skip_special_tokens"],
        shows_token_ids=values["return_token_ids"],
        prompt_logprobs=prompt_logprobs,
        truncation=None if cut_to is None else Truncation(cut_to, values["truncation_side"]),
        seeded=fields.values.get("seed") is not None,
        salt=values["cache_salt"],
        priority=values["priority"],
        local_prefill=values["dynrt"],
    )


def _read_truncate_prompt_tokens(fields: Fields) -> int | None:
    tokens = fields.values["truncate_prompt_tokens"]
    if type(tokens) is int and (tokens == WHAT_FITS or tokens >= 1):
        return tokens
    fields.refuse(
        "truncate_prompt_tokens", f"it must be an integer, at least 1, or {WHAT_FITS} for what fits"
    )
    return None


def _read_truncation_side(fields: Fields) -> Literal["left", "right"]:
    side = fields.values["truncation_side"]
    if side not in ("left", "right"):
        fields.refuse("truncation_side", 'it must be "left" or "right"')
    return "right" if side == "right" else "left"


def _read_stream_options(fields: Fields) -> StreamOptions:
    if fields.values.get("stream") in (None, False):
        fields.refuse("stream_options", "it must be left out, or stream be true")
    options = fields.child("stream_options")
    return StreamOptions(
        options.boolean("include_usage", False), options.boolean("continuous_usage_stats", False)
    )


def _read_dynrt(fields: Fields) -> LocalPrefill | None:
    extension = fields.child("dynrt")
    for name in extension.values:
        if name != "local_prefill":
            extension.refuse(name, "it must be left out: dynrt has no field but local_prefill")
    choice = extension.values.get("local_prefill")
    if choice is None or choice in get_args(LocalPrefill):
        return choice
    extension.refuse("local_prefill", 'it must be "auto", "never" or "always"')
    return None


MODEL = string("model", "One of /v1/models; may be left out where there is one.", MAX_NAME_CHARS)
STREAM = boolean("stream", "Answer with server-sent events, as the text comes.", False)
STREAM_OPTIONS = Parameter(
    "stream_options",
    "Only with stream: usage in a last event without choices, usage in every event.",
    {
        "type": ["object", "null"],
        "properties": {
            "include_usage": {"type": ["boolean", "null"]},
            "continuous_usage_stats": {"type": ["boolean", "null"]},
        },
    },
    _read_stream_options,
    StreamOptions(),
)
N = integer("n", f"Choices; those of all prompts together at most {MAX_CHOICES}.", 1, 1, MAX_CHOICES)
BEST_OF = integer("best_of", "Taken for the sake of old clients, if it is at most n.", 1, 1, MAX_CHOICES)
MAX_TOKENS = integer(
    "max_tokens", "The most tokens of an answer; prompt and answer fit the context.", None, 1
)
MAX_COMPLETION_TOKENS = integer("max_completion_tokens", "The newer name of max_tokens; it wins.", None, 1)
PROMPT_LOGPROBS = integer(
    "prompt_logprobs",
    "Log probabilities of the prompt's tokens, and of so many alternatives; not in streams.",
    None,
    0,
    MAX_LOGPROBS,
)
TRUNCATE_PROMPT_TOKENS = Parameter[int | None](
    "truncate_prompt_tokens",
    f"Use so many tokens of a prompt that has more; {WHAT_FITS}: as many as leave room for the answer.",
    {"anyOf": [{"type": "integer", "minimum": 1}, {"enum": [WHAT_FITS, None]}]},
    _read_truncate_prompt_tokens,
    None,
)
TRUNCATION_SIDE = Parameter[Literal["left", "right"]](
    "truncation_side",
    "With truncate_prompt_tokens: where tokens are cut off. left, the default, keeps the prompt's end.",
    {"enum": ["left", "right", None]},
    _read_truncation_side,
    "left",
)
RETURN_TOKEN_IDS = boolean("return_token_ids", "Tell the token ids of prompt and answer.", False)
SKIP_SPECIAL_TOKENS = boolean("skip_special_tokens", "false: they are part of the text.", True)
CACHE_SALT = string("cache_salt", "Only requests of the same salt share cached prompts.", MAX_SALT_CHARS)
PRIORITY = integer(
    "priority", "Lower ones are served first, where priorities count.", 0, -MAX_INT32, MAX_INT32
)
USER = Parameter[None]("user", "Ignored.", {"type": ["string", "null"]}, lambda fields: None, None)
DYNRT = Parameter[LocalPrefill | None](
    "dynrt",
    "For tests and benches: whether the prompt is computed where the answer is.",
    {
        "type": ["object", "null"],
        "properties": {"local_prefill": {"enum": [*get_args(LocalPrefill), None]}},
        "additionalProperties": False,
    },
    _read_dynrt,
    None,
)

ANSWERING: tuple[Parameter[Any], ...] = (
    MODEL, STREAM, STREAM_OPTIONS, N, BEST_OF, MAX_COMPLETION_TOKENS, PROMPT_LOGPROBS, TRUNCATE_PROMPT_TOKENS,
    TRUNCATION_SIDE, RETURN_TOKEN_IDS, SKIP_SPECIAL_TOKENS, CACHE_SALT, PRIORITY, USER, DYNRT, *GRAMMAR,
)  # fmt: skip
SHARED: tuple[Parameter[Any], ...] = (*ANSWERING, *SAMPLING)
