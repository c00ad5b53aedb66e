"""Reads JSON off a tape while it is being written; raises Malformed at the first character that breaks it.

Line breaks and other control characters inside strings are let through: models write them, and readers that
are not strict take them.
"""

from __future__ import annotations

import json
import re

from dynrt.runtime.http.answers.tape import SPACE, Reading, Tape

MAX_DEPTH = 64  # each level is a generator of its own

_PLAIN = re.compile(r'[^"\\]*')
_SCALAR_CHARS = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_HEX_DIGITS = frozenset("0123456789abcdefABCDEF")


class Malformed(Exception):  # noqa: N818  (tells what was read; nothing went wrong here)
    """What comes next cannot be part of what was being read."""


def expect(tape: Tape, literal: str) -> Reading[None]:
    if not (yield from tape.accept(literal)):
        raise Malformed


def read_string(tape: Tape) -> Reading[str]:
    """The value of a string. Nothing may be taken off the tape meanwhile."""
    start = tape.mark
    yield from skip_string(tape)
    value: str = json.loads(tape.read[start:], strict=False)
    return value


def skip_string(tape: Tape) -> Reading[None]:
    yield from expect(tape, '"')
    while True:
        yield from tape.read_while(_PLAIN)
        if (yield from tape.accept('"')):
            return
        yield from _skip_escape(tape)


def _skip_escape(tape: Tape) -> Reading[None]:
    yield from expect(tape, "\\")
    kind = yield from tape.peek()
    if not kind or kind not in '"\\/bfnrtu':
        raise Malformed
    tape.skip()
    for _ in range(4 if kind == "u" else 0):
        if (yield from tape.peek()) not in _HEX_DIGITS:
            raise Malformed
        tape.skip()


def skip_value(tape: Tape, depth: int = 0) -> Reading[None]:
    first = yield from tape.peek()
    if first == "{":
        yield from skip_object(tape, depth)
    elif first == "[":
        yield from _skip_array(tape, depth)
    elif first == '"':
        yield from skip_string(tape)
    elif not _SCALAR.fullmatch((yield from tape.read_while(_SCALAR_CHARS))):
        raise Malformed


def skip_object(tape: Tape, depth: int = 0) -> Reading[None]:
    _check_depth(depth)
    yield from expect(tape, "{")
    is_first = True
    while (yield from another(tape, "}", is_first=is_first)):
        yield from skip_string(tape)
        yield from skip_colon(tape)
        yield from skip_value(tape, depth + 1)
        is_first = False


def _skip_array(tape: Tape, depth: int) -> Reading[None]:
    _check_depth(depth)
    yield from expect(tape, "[")
    is_first = True
    while (yield from another(tape, "]", is_first=is_first)):
        yield from skip_value(tape, depth + 1)
        is_first = False


def another(tape: Tape, closing: str, *, is_first: bool) -> Reading[bool]:
    """Go on to the next element of an array or object, or read its `closing` bracket."""
    yield from tape.read_while(SPACE)
    if (yield from tape.accept(closing)):
        return False
    if not is_first:
        yield from expect(tape, ",")
        yield from tape.read_while(SPACE)
    return True


def skip_colon(tape: Tape) -> Reading[None]:
    yield from tape.read_while(SPACE)
    yield from expect(tape, ":")
    yield from tape.read_while(SPACE)


def _check_depth(depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise Malformed
