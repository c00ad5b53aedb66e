"""What all formats of calls share: text before and between calls, calls as JSON objects, and what looks like one.

A format is a generator that reads the tape. What it has read counts as text until a call has begun, that is until
the name of an offered tool is known. So a call that breaks off before that is given back as text, and one that
breaks off later ends there, and what follows is text.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from dynrt.runtime.http.answers.tape import REST, SPACE, Reading, Tape
from dynrt.runtime.http.answers.tools.events import ArgumentsPiece, CallBegun, CallEnded, Text, ToolEvent
from dynrt.runtime.http.answers.tools.json_reading import (
    Malformed,
    another,
    expect,
    read_string,
    skip_colon,
    skip_object,
    skip_value,
)

ARGUMENT_KEYS = ("arguments", "parameters")
KEYS_AHEAD = ("id", "type")  # what else models write ahead of the name


class CallParser:
    """Base of the formats; `tools` are the names that can be called. White space around calls is no text."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = frozenset(tools)
        self._tape = Tape()
        self._events: list[ToolEvent] = []
        self._num_calls = 0
        self._reads: Literal["text", "arguments", "undecided"] = "undecided"
        self._reading = self._read()

    def feed(self, piece: str) -> list[ToolEvent]:
        self._tape.put(piece)
        return self._go_on()

    def finish(self) -> list[ToolEvent]:
        self._tape.ended = True
        return self._go_on()

    def _read(self) -> Reading[None]:
        """The format: reads the tape to its end."""
        raise NotImplementedError

    def _go_on(self) -> list[ToolEvent]:
        next(self._reading, None)
        self._give()
        events, self._events = self._events, []
        return events

    def _give(self) -> None:
        """Give out what was read, as what it is known to be."""
        if self._reads == "arguments" and self._tape.mark:
            self._events.append(ArgumentsPiece(self._num_calls - 1, self._tape.take()))
        elif self._reads == "text":
            certain = len(self._tape.read.rstrip())  # a call may follow the white space
            if certain:
                self._events.append(Text(self._tape.take(certain)))

    def _text_before(self, marker: str) -> Reading[bool]:
        """Give out text up to `marker`, which is next on the tape then; False at the end of all."""
        self._reads = "text"
        found = yield from self._tape.read_until(marker)
        if found:
            self._give()
        else:
            self._give_rest()
        self._reads = "undecided"
        return found

    def _text_to_end(self) -> Reading[None]:
        self._reads = "text"
        yield from self._tape.read_while(REST)
        self._give_rest()

    def _give_rest(self) -> None:
        rest = self._tape.take()
        if rest and not (self._num_calls and rest.isspace()):
            self._events.append(Text(rest))

    def _attempt(self, calls: Reading[None]) -> Reading[None]:
        """Read `calls`. What breaks off before a call has begun stays on the tape, to be given out as text."""
        try:
            yield from calls
        except Malformed:
            if self._reads == "arguments":
                self._end_call()

    def _call_list(self) -> Reading[None]:
        """[call, …]: one at least, as a list of none is no call."""
        yield from self._tape.read_while(SPACE)
        yield from expect(self._tape, "[")
        is_first = True
        while (yield from another(self._tape, "]", is_first=is_first)):
            yield from self._call_object()
            is_first = False
        if is_first:
            raise Malformed
        self._tape.take()

    def _call_object(self) -> Reading[None]:
        """{"name": "…", "arguments": {…}}: in any order; no arguments are {}, other members are passed over."""
        yield from self._tape.read_while(SPACE)
        yield from expect(self._tape, "{")
        name: str | None = None
        held = "{}"  # the arguments, until the name is known
        is_told = False
        seen: set[str] = set()
        while (yield from another(self._tape, "}", is_first=not seen)):
            member = yield from self._member_name(seen)
            if member == "name":
                name = yield from self._tool_name()
            elif member == "arguments" and name is not None:
                yield from self._told_arguments(name)
                is_told = True
            elif member == "arguments":
                held = yield from self._held_arguments()
            elif name is not None or member in KEYS_AHEAD:
                yield from skip_value(self._tape)
            else:
                raise Malformed
        if name is None:
            raise Malformed
        if not is_told:
            self._begin_call(name)
            self._events.append(ArgumentsPiece(self._num_calls - 1, held))
            self._end_call()
        self._tape.take()

    def _member_name(self, seen: set[str]) -> Reading[str]:
        """The name of the next member, up to its value; either word for arguments is "arguments"."""
        key = yield from read_string(self._tape)
        yield from skip_colon(self._tape)
        name = "arguments" if key in ARGUMENT_KEYS else key
        if name in seen:
            raise Malformed
        seen.add(name)
        return name

    def _tool_name(self) -> Reading[str]:
        name = yield from read_string(self._tape)
        self._check_offered(name)
        return name

    def _check_offered(self, name: str) -> None:
        if name not in self._tools:
            raise Malformed

    def _held_arguments(self) -> Reading[str]:
        start = self._tape.mark
        yield from skip_object(self._tape)
        return self._tape.read[start:]

    def _told_arguments(self, name: str) -> Reading[None]:
        """Arguments that are given out while they are read: the call has begun."""
        yield from self._tape.read_while(SPACE)
        if (yield from self._tape.peek()) != "{":
            raise Malformed
        self._begin_call(name)
        self._reads = "arguments"
        yield from skip_object(self._tape)
        self._end_call()

    def _begin_call(self, name: str) -> None:
        self._tape.take()
        self._events.append(CallBegun(self._num_calls, name))
        self._num_calls += 1

    def _end_call(self) -> None:
        self._give()
        self._events.append(CallEnded(self._num_calls - 1))
        self._reads = "undecided"
