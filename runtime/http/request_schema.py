"""Declares a request's parameters once: one object reads a parameter from a body and describes it in /openapi.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import msgspec

from dynrt.runtime.http.fields import Fields

T = TypeVar("T")
Default = TypeVar("Default")

Schema = dict[str, Any]  # JSON schema


class Parameter(msgspec.Struct, Generic[T], frozen=True):
    """`read` returns its value, or a default if it is absent, null or refused: then the fields' problems have it."""

    name: str
    schema: Schema
    read: Callable[[Fields], T]


def integer(
    name: str, about: str, default: Default, low: int, high: int | None = None
) -> Parameter[int | Default]:
    limits = {"minimum": low} | ({} if high is None else {"maximum": high})
    return Parameter(
        name,
        described({"type": ["integer", "null"], **limits}, about, default),
        lambda fields: fields.integer(name, default, low, high),
    )


def number(name: str, about: str, default: float, low: float, high: float) -> Parameter[float]:
    return Parameter(
        name,
        described({"type": ["number", "null"], "minimum": low, "maximum": high}, about, default),
        lambda fields: fields.number(name, default, low, high),
    )


def boolean(name: str, about: str, default: bool) -> Parameter[bool]:
    return Parameter(
        name,
        described({"type": ["boolean", "null"]}, about, default),
        lambda fields: fields.boolean(name, default),
    )


def string(name: str, about: str, max_chars: int) -> Parameter[str]:
    """Empty if absent; never empty otherwise."""
    limits = {"minLength": 1, "maxLength": max_chars}
    return Parameter(
        name,
        described({"type": ["string", "null"], **limits}, about),
        lambda fields: fields.string(name, "", max_chars),
    )


def described(schema: Schema, about: str, default: object = None) -> Schema:
    """`schema` with what people need to know of it."""
    shown = {} if default is None else {"default": default}
    return {**schema, "description": about, **shown}


def body_schema(
    title: str, about: str, parameters: Iterable[Parameter[Any]], required: Iterable[str] = ()
) -> Schema:
    """The JSON schema of an object with `parameters`. Fields that are not named are tolerated."""
    return {
        "title": title,
        "description": about,
        "type": "object",
        "properties": {parameter.name: parameter.schema for parameter in parameters},
        "required": [*required],
        "additionalProperties": True,
    }
