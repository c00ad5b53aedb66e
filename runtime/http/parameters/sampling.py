"""The parameters that say how tokens are chosen and when to stop."""

from __future__ import annotations

from typing import Any

from dynrt.runtime.http.parameters.fields import Fields
from dynrt.runtime.http.parameters.request_schema import Parameter, ParameterSet, boolean, integer, number

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_BIASED_TOKENS = 1024
MAX_BIAS = 100.0
MIN_REPETITION_PENALTY = 0.01
MAX_LOGPROBS = 20
MAX_INT32 = 2**31 - 1
MAX_INT64 = 2**63 - 1
MAX_UINT32 = 2**32 - 1


def read_sampling(fields: Fields) -> dict[str, Any]:
    """What is given of messages.SamplingParams, whose defaults are those of the parameters."""
    values = _SAMPLING.given(fields)
    if values.get("top_k") == -1:
        values["top_k"] = 0
    if values.get("top_p") == 0:  # OpenAI takes it: the smallest set there is, the top token alone
        values |= {"top_p": 1.0, "top_k": 1}
    return values


def are_token_ids(values: list[Any]) -> bool:
    """Whether all are integers that fit a packed prompt. No Python per value: a body may have millions."""
    return not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_UINT32)


def _read_stop(fields: Fields) -> tuple[str, ...]:
    stop = fields.values.get("stop")
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


def _read_stop_token_ids(fields: Fields) -> tuple[int, ...]:
    ids = fields.values.get("stop_token_ids")
    if isinstance(ids, list) and len(ids) <= MAX_STOP_TOKEN_IDS and are_token_ids(ids):
        return tuple(ids)
    fields.refuse(
        "stop_token_ids", f"it must be a list of up to {MAX_STOP_TOKEN_IDS} token ids, none negative"
    )
    return ()


def _read_logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    bias = fields.child("logit_bias")
    if len(bias.values) > MAX_BIASED_TOKENS:
        fields.refuse("logit_bias", f"it must have at most {MAX_BIASED_TOKENS} tokens")
        return ()
    read = []
    for key in bias.values:
        if not (key.isascii() and key.isdigit() and len(key) <= len(str(MAX_UINT32))):
            bias.refuse(key, "it must be under a token id, written as a string of digits")
        elif bias.values[key] is None:
            bias.refuse(key, f"it must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        else:
            read.append((int(key), bias.number(key, 0.0, -MAX_BIAS, MAX_BIAS)))
    return tuple(read)


TEMPERATURE = number("temperature", "0: always the likeliest token.", 1.0, 0.0, 2.0)
TOP_P = number(
    "top_p", "Only the likeliest tokens with this share of the probability; 0: one.", 1.0, 0.0, 1.0
)
TOP_K = integer("top_k", "Only so many of the likeliest tokens; 0 or -1: all.", 0, -1, MAX_INT32)
MIN_P = number(
    "min_p", "Only tokens of this share of the likeliest one's probability or more.", 0.0, 0.0, 1.0
)
SEED = integer(
    "seed",
    "The same seed, the same tokens, whatever runs beside. Choice i of a prompt uses seed + i. Absent: drawn.",
    None,
    -MAX_INT64 - 1,
    MAX_INT64,
)
PRESENCE_PENALTY = number(
    "presence_penalty", "Taken off the logit of each token that the answer has.", 0.0, -2.0, 2.0
)
FREQUENCY_PENALTY = number(
    "frequency_penalty", "Taken off a token's logit for each time that the answer has it.", 0.0, -2.0, 2.0
)
REPETITION_PENALTY = number(
    "repetition_penalty",
    "Divides positive logits of tokens that prompt or answer have, multiplies negative ones.",
    1.0,
    MIN_REPETITION_PENALTY,
    2.0,
)
LOGIT_BIAS = Parameter[tuple[tuple[int, float], ...]](
    "logit_bias",
    "By token id, what is added to its logit.",
    {
        "type": ["object", "null"],
        "maxProperties": MAX_BIASED_TOKENS,
        "propertyNames": {"pattern": "^[0-9]+$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
    },
    _read_logit_bias,
    (),
)
MIN_TOKENS = integer("min_tokens", "Nothing ends the answer before it has so many tokens.", 0, 0, MAX_INT32)
IGNORE_EOS = boolean(
    "ignore_eos", "Go on behind the end of the sequence; stop and stop_token_ids count.", False
)
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
STOP = Parameter[tuple[str, ...]](
    "stop",
    "Strings before which the answer ends.",
    {"anyOf": [{"type": "null"}, _STOP, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP}]},
    _read_stop,
    (),
)
STOP_TOKEN_IDS = Parameter[tuple[int, ...]](
    "stop_token_ids",
    "Tokens with which the answer ends.",
    {"type": ["array", "null"], "maxItems": MAX_STOP_TOKEN_IDS, "items": {"type": "integer", "minimum": 0}},
    _read_stop_token_ids,
    (),
)
INCLUDE_STOP = boolean("include_stop_str_in_output", "Whether the answer shows the stop string.", False)

SAMPLING: tuple[Parameter[Any], ...] = (
    TEMPERATURE, TOP_P, TOP_K, MIN_P, SEED, PRESENCE_PENALTY, FREQUENCY_PENALTY, REPETITION_PENALTY, LOGIT_BIAS,
    MIN_TOKENS, IGNORE_EOS, STOP, STOP_TOKEN_IDS, INCLUDE_STOP,
)  # fmt: skip
_SAMPLING = ParameterSet(SAMPLING)
