"""What a tool parser says about the text it is fed."""

from __future__ import annotations

from typing import Protocol

import msgspec


class Text(msgspec.Struct, frozen=True):
    """Part of the answer proper."""

    text: str


class CallBegun(msgspec.Struct, frozen=True):
    """A call of the tool `name`; calls count from 0."""

    index: int
    name: str


class ArgumentsPiece(msgspec.Struct, frozen=True):
    """The next part of a call's arguments: JSON as the model wrote it, complete with the call's end."""

    index: int
    json: str


class CallEnded(msgspec.Struct, frozen=True):
    """The arguments are complete, or the model broke them off."""

    index: int


ToolEvent = Text | CallBegun | ArgumentsPiece | CallEnded


class ToolParser(Protocol):
    """Fed a text in pieces of any size, says the same but for how texts and arguments are cut."""

    def feed(self, piece: str) -> list[ToolEvent]:
        """What `piece` makes certain."""
        ...

    def finish(self) -> list[ToolEvent]:
        """What the end makes certain. Nothing may be fed behind it."""
        ...
