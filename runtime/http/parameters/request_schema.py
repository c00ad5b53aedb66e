"""Declares a request's parameters once: one object reads a parameter from a body and describes it in /openapi.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from dynrt.runtime.http.parameters.fields import Fields

T = TypeVar("T")
Default = TypeVar("Default")

Schema = dict[str, Any]  # JSON schema


class Parameter(msgspec.Struct, Generic[T], frozen=True):
    """`take` reads it where it is there; of a value that it refuses the fields' problems tell, and the default is read.

    A required one is for `take` to refuse, too, if it is not there. `about` and the default are part of the schema.
    """

    name: str
    about: str
    limits: Schema
    take: Callable[[Fields], T]
    default: T
    required: bool = False

    def read(self, fields: Fields) -> T:
        """Its value, or its default if it is absent, null or refused."""
        if fields.values.get(self.name) is None and not self.required:
            return self.default
        return self.take(fields)

    @property
    def schema(self) -> Schema:
        is_told = isinstance(self.default, bool | int | float) and not self.required
        default = {"default": self.default} if is_told else {}
        return {**self.limits, "description": self.about, **default}


class ParameterSet:
    """Many parameters, none of them required, of which a body has few: only those are looked at."""

    def __init__(self, parameters: Iterable[Parameter[Any]]) -> None:
        parameters = [*parameters]
        assert not any(parameter.required for parameter in parameters)
        self._takes = {parameter.name: parameter.take for parameter in parameters}
        self._defaults = {parameter.name: parameter.default for parameter in parameters}

    def given(self, fields: Fields) -> dict[str, Any]:
        """The values of those that the body has, by name."""
        takes = self._takes
        return {
            name: takes[name](fields)
            for name, value in fields.values.items()
            if name in takes and value is not None
        }

    def read(self, fields: Fields) -> dict[str, Any]:
        """The values of all, by name."""
        return self._defaults | self.given(fields)


def integer(
    name: str, about: str, default: Default, low: int, high: int | None = None
) -> Parameter[int | Default]:
    limits: Schema = {"type": ["integer", "null"], "minimum": low}
    if high is not None:
        limits["maximum"] = high
    take = partial(Fields.integer, name=name, default=default, low=low, high=high)
    return Parameter(name, about, limits, take, default)


def number(name: str, about: str, default: float, low: float, high: float) -> Parameter[float]:
    limits = {"type": ["number", "null"], "minimum": low, "maximum": high}
    take = partial(Fields.number, name=name, default=default, low=low, high=high)
    return Parameter(name, about, limits, take, default)


def boolean(name: str, about: str, default: bool) -> Parameter[bool]:
    limits = {"type": ["boolean", "null"]}
    return Parameter(name, about, limits, partial(Fields.boolean, name=name, default=default), default)


def string(name: str, about: str, max_chars: int) -> Parameter[str]:
    """Empty if absent; never empty otherwise."""
    limits = {"type": ["string", "null"], "minLength": 1, "maxLength": max_chars}
    return Parameter(
        name, about, limits, partial(Fields.string, name=name, default="", max_chars=max_chars), ""
    )


def body_schema(
    title: str, about: str, parameters: Iterable[Parameter[Any]], *, needs_one: bool = False
) -> Schema:
    """The JSON schema of an object with `parameters`. Fields that are not named are tolerated.

    `needs_one`: any one of the required parameters is enough.
    """
    parameters = [*parameters]
    required = [parameter.name for parameter in parameters if parameter.required]
    return {
        "title": title,
        "description": about,
        "type": "object",
        "properties": {parameter.name: parameter.schema for parameter in parameters},
        **({"anyOf": [{"required": [name]} for name in required]} if needs_one else {"required": required}),
        "additionalProperties": True,
    }
