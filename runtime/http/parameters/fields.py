"""Reads typed fields of a JSON object and gathers every problem under its dotted name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from dynrt.runtime.errors import InvalidRequestError

MAX_PROBLEMS = 10
MAX_SHOWN_CHARS = 64

Default = TypeVar("Default")


def shown(value: object) -> str:
    """A JSON value as an error message quotes it: scalars cut to MAX_SHOWN_CHARS, containers by their kind."""
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, str) and len(value) > MAX_SHOWN_CHARS:
        value = value[:MAX_SHOWN_CHARS] + "…"
    return msgspec.json.encode(value).decode()


class Problems:
    """What is wrong with one request, in the order found; at most MAX_PROBLEMS are kept."""

    def __init__(self) -> None:
        self._found: list[tuple[str, str]] = []

    def add(self, param: str, message: str) -> None:
        if len(self._found) < MAX_PROBLEMS:
            self._found.append((param, message))

    @property
    def none(self) -> bool:
        return not self._found

    def raise_if_any(self) -> None:
        """Raise one InvalidRequestError that tells all of them; its param is the first one's."""
        if self._found:
            message = "; ".join(message for _, message in self._found)
            raise InvalidRequestError(message, param=self._found[0][0])


class Fields:
    """One JSON object being read. A reader returns the default for an absent, null or refused field."""

    def __init__(
        self,
        values: dict[str, Any],
        problems: Problems,
        path: str = "",
        names: Mapping[str, str] | None = None,
    ) -> None:
        """`names`: what fields are called in the body that the client sent, where that is another."""
        self.values = values
        self.problems = problems
        self._path = path
        self._names = names or {}

    def param(self, name: str) -> str:
        name = self._names.get(name, name)
        return f"{self._path}.{name}" if self._path else name

    def refuse(self, name: str, rule: str) -> None:
        """Note that field `name` breaks `rule`, a clause that starts with "it must"."""
        param = self.param(name)
        self.problems.add(param, f"{param} is {shown(self.values.get(name))}; {rule}")

    def integer(self, name: str, default: Default, low: int, high: int | None = None) -> int | Default:
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is int and low <= value and (high is None or value <= high):
            return value
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        self.refuse(name, f"it must be an integer, {limits}")
        return default

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) in (int, float) and low <= value <= high:
            return float(value)
        self.refuse(name, f"it must be a number from {low:g} to {high:g}")
        return default

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        self.refuse(name, "it must be true or false")
        return default

    def string(self, name: str, default: str, max_chars: int) -> str:
        value = self.values.get(name)
        if value is None:
            return default
        if isinstance(value, str) and 1 <= len(value) <= max_chars:
            return value
        self.refuse(name, f"it must be a string of 1 to {max_chars} characters")
        return default

    def text(self, name: str) -> str:
        """A string that must be there; it may be empty."""
        value = self.values.get(name)
        if isinstance(value, str):
            return value
        self.refuse(name, "it must be a string")
        return ""

    def child(self, name: str) -> Fields:
        """The object in field `name`; one without fields if it is absent or refused."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            self.refuse(name, "it must be an object")
            value = None
        return Fields(value or {}, self.problems, self.param(name))
