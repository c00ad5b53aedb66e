"""Reads what bodies say beside their prompts: most clients say the same with each prompt, so it is mostly known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from dynrt.runtime.http.parameters.fields import Fields

MAX_KNOWN = 256
MAX_KEY_BYTES = 2048

T = TypeVar("T")

_encode = msgspec.json.Encoder().encode


class ReadOnce(Generic[T]):
    """Does `read` once for all bodies that differ in nothing but the fields `but`, which `read` must not look at.

    What it returns must not be changed. Bodies with problems, and long ones, are read each time.
    """

    def __init__(self, read: Callable[[Fields], T], but: tuple[str, ...]) -> None:
        self._read = read
        self._but = but
        self._known: dict[bytes, T] = {}

    def __call__(self, fields: Fields) -> T:
        rest = fields.values.copy()
        for name in self._but:
            rest.pop(name, None)
        try:
            key = _encode(rest)
        except RecursionError:  # nested as deeply as could just be decoded
            return self._read(fields)
        known = self._known.get(key)
        return self._read_new(fields, key) if known is None else known

    def _read_new(self, fields: Fields, key: bytes) -> T:
        value = self._read(fields)
        if fields.problems.none and len(key) <= MAX_KEY_BYTES:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[key] = value
        return value
