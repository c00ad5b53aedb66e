"""The parameters that say what the answer must look like: response_format and structured_outputs."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from dynrt.runtime.errors import InvalidRequestError
from dynrt.runtime.http.parameters.fields import Fields
from dynrt.runtime.http.parameters.request_schema import Parameter
from dynrt.runtime.messages import Grammar
from dynrt.runtime.requests import ModelCard

MAX_SPEC_CHARS = 256 * 1024
MAX_CHOICES = 4096
MAX_SCHEMA_NAME_CHARS = 64
KINDS = ("json", "regex", "choice", "grammar", "json_object")


class AskedGrammar(msgspec.Struct, frozen=True):
    """A grammar and the parameter that asked for it."""

    grammar: Grammar
    param: str


async def check_grammar(asked: AskedGrammar, card: ModelCard) -> None:
    """Raises InvalidRequestError if the model's engines take none, or if it is none."""
    if not card.takes_grammar:
        raise InvalidRequestError(
            f"{asked.param} is given, but an engine that serves {card.name} cannot follow one; leave it out,"
            " or serve the model by engines that can, all of them native or vllm",
            param=asked.param,
        )
    try:
        await asyncio.to_thread(_check, asked.grammar)
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, param=asked.param) from None


def _check(grammar: Grammar) -> None:
    from dynrt.engines.native.grammar import check  # here: most servers are never asked, and spare the memory

    check(grammar)


def asked_grammar(fields: Fields, values: dict[str, Any]) -> AskedGrammar | None:
    """What is asked for under either name of GRAMMAR, whose `values` these are; under both is a problem."""
    by_format, by_structure = values["response_format"], values["structured_outputs"]
    if by_format is not None and by_structure is not None:
        fields.refuse("structured_outputs", "it must be left out where response_format asks for JSON")
    asked: AskedGrammar | None = by_format or by_structure
    return asked


def _read_response_format(fields: Fields) -> AskedGrammar | None:
    form = fields.child("response_format")
    if not isinstance(fields.values["response_format"], dict):
        return None
    match form.values.get("type"):
        case "text":
            return None
        case "json_object":
            return AskedGrammar(Grammar("json_object"), "response_format")
        case "json_schema":
            return _schema_of(form)
        case _:
            form.refuse("type", 'it must be "text", "json_object" or "json_schema"')
            return None


def _schema_of(form: Fields) -> AskedGrammar | None:
    if form.values.get("json_schema") is None:
        form.refuse("json_schema", 'it must be an object with the fields "name" and "schema"')
        return None
    described_schema = form.child("json_schema")
    described_schema.string("name", "", MAX_SCHEMA_NAME_CHARS)
    described_schema.boolean("strict", False)  # it is followed in any case
    schema = described_schema.values.get("schema")
    if not isinstance(schema, dict):
        if isinstance(form.values["json_schema"], dict):
            described_schema.refuse("schema", "it must be a JSON schema, an object")
        return None
    return _checked(described_schema, "schema", Grammar("json_schema", _json(schema)), "response_format")


def _read_structured_outputs(fields: Fields) -> AskedGrammar | None:
    asked = fields.child("structured_outputs")
    kinds = [kind for kind, value in asked.values.items() if value is not None and value is not False]
    if not kinds:
        return None
    for kind in set(kinds).difference(KINDS):
        asked.refuse(kind, f"it must be left out: structured_outputs takes {', '.join(KINDS)}")
        return None
    if len(kinds) > 1:
        fields.refuse("structured_outputs", f"it must have one of {', '.join(KINDS)}, not {len(kinds)}")
        return None
    [kind] = kinds
    grammar = _grammar(kind, asked.values[kind])
    if grammar is None:
        asked.refuse(kind, _RULES[kind])
        return None
    return _checked(asked, kind, grammar, "structured_outputs")


def _grammar(kind: str, value: Any) -> Grammar | None:
    """None if `value` is not one of that kind."""
    match kind, value:
        case "json", dict():
            return Grammar("json_schema", _json(value))
        case "json", str():
            return Grammar("json_schema", value) if _is_object(value) else None
        case "regex" | "grammar", str() if value:
            return Grammar("regex" if kind == "regex" else "grammar", value)
        case "choice", list() if _are_choices(value):
            return Grammar("choice", _json(value))
        case "json_object", True:
            return Grammar("json_object")
        case _:
            return None


_RULES = {
    "json": "it must be a JSON schema, an object or one written as a string",
    "regex": "it must be a regular expression, a string that is not empty",
    "choice": f"it must be a list of 1 to {MAX_CHOICES} strings, none empty",
    "grammar": "it must be an EBNF grammar, a string that is not empty",
    "json_object": "it must be true",
}


def _are_choices(values: list[Any]) -> bool:
    return 1 <= len(values) <= MAX_CHOICES and all(isinstance(value, str) and value for value in values)


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _checked(fields: Fields, name: str, grammar: Grammar, param: str) -> AskedGrammar | None:
    if len(grammar.spec) <= MAX_SPEC_CHARS:
        return AskedGrammar(grammar, param)
    fields.refuse(name, f"it must be at most {MAX_SPEC_CHARS} characters; it has {len(grammar.spec)}")
    return None


_JSON_SCHEMA = {
    "type": ["object", "null"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": MAX_SCHEMA_NAME_CHARS},
        "schema": {"type": "object"},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["schema"],
}
RESPONSE_FORMAT = Parameter[AskedGrammar | None](
    "response_format",
    "JSON, of a schema or any.",
    {
        "type": ["object", "null"],
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": _JSON_SCHEMA,
        },
        "required": ["type"],
    },
    _read_response_format,
    None,
)
STRUCTURED_OUTPUTS = Parameter[AskedGrammar | None](
    "structured_outputs",
    "One of: a JSON schema, a regular expression, a list of answers, an EBNF grammar, any JSON object.",
    {
        "type": ["object", "null"],
        "properties": {
            "json": {"type": ["object", "string", "null"]},
            "regex": {"type": ["string", "null"]},
            "choice": {"type": ["array", "null"], "items": {"type": "string", "minLength": 1}},
            "grammar": {"type": ["string", "null"]},
            "json_object": {"type": ["boolean", "null"]},
        },
        "additionalProperties": {"enum": [None, False]},
    },
    _read_structured_outputs,
    None,
)
GRAMMAR: tuple[Parameter[Any], ...] = (RESPONSE_FORMAT, STRUCTURED_OUTPUTS)
