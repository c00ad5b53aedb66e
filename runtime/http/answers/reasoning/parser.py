"""Splits generated text into reasoning and answer, by the tags that the model writes around its reasoning."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dynrt.runtime.http.answers.tape import REST, SPACE, Reading, Tape


class Thought(msgspec.Struct, frozen=True):
    """Part of the reasoning."""

    text: str


class Answer(msgspec.Struct, frozen=True):
    """Part of what comes behind the reasoning; all, if the model does not reason."""

    text: str


class ReasoningParser:
    """Reasoning is between `opening` and `closing`, at the beginning of the text or nowhere.

    `is_open`: the prompt has written `opening` already. White space around the tags is neither reasoning nor
    answer. Fed a text in pieces of any size, it says the same but for how reasoning and answer are cut.
    """

    def __init__(self, opening: str, closing: str, *, is_open: bool) -> None:
        self._opening = opening
        self._closing = closing
        self._is_open = is_open
        self._tape = Tape()
        self._told: list[Thought | Answer] = []
        self._kind: Callable[[str], Thought | Answer] | None = None  # of what is being read; None: undecided
        self._reading = self._read()

    def feed(self, piece: str) -> list[Thought | Answer]:
        """What `piece` makes certain."""
        self._tape.put(piece)
        return self._go_on()

    def finish(self) -> list[Thought | Answer]:
        """What the end makes certain."""
        self._tape.ended = True
        return self._go_on()

    def _go_on(self) -> list[Thought | Answer]:
        next(self._reading, None)
        self._tell()
        told, self._told = self._told, []
        return told

    def _tell(self) -> None:
        """Tell what was read; of reasoning, without white space at its end, which may lead to the closing tag."""
        if self._kind is None:
            return
        read = self._tape.read
        text = self._tape.take(len(read.rstrip() if self._kind is Thought else read))
        if text:
            self._told.append(self._kind(text))

    def _read(self) -> Reading[None]:
        opened = yield from self._tape.accept_spaced(self._opening)
        if opened or self._is_open:
            yield from self._drop_space()
            yield from self._thoughts()
        self._kind = Answer
        yield from self._tape.read_while(REST)

    def _thoughts(self) -> Reading[None]:
        self._kind = Thought
        yield from self._tape.read_until(self._closing)
        self._tell()
        self._kind = None
        yield from self._tape.accept_spaced(self._closing)
        yield from self._drop_space()

    def _drop_space(self) -> Reading[None]:
        yield from self._tape.read_while(SPACE)
        self._tape.take()
