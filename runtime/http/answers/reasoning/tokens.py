"""Counts the tokens of an answer that are reasoning: from the tokens themselves, however their text is cut and told."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from dynrt.engines.token_bytes import TokenBytes


class ReasoningTokens:
    """Those that have text between the tags; tags are as in ReasoningParser.

    White space is text; special tokens are none, unless they are the tags. While the closing tag may have begun, its
    tokens count.
    """

    def __init__(self, opening: str, closing: str, vocabulary: TokenBytes, *, is_open: bool) -> None:
        self._vocabulary = vocabulary
        self._tags = (opening, closing)
        self._opening = opening.encode()
        self._closing = closing.encode()
        self._is_open = is_open
        self._text = bytearray()
        self._ends = array("Q")  # of the tokens, in the text
        self._start: int | None = None  # of the reasoning, in the text
        self._searched = 0  # the closing tag does not begin before
        self._final: int | None = None

    def add(self, token_ids: Iterable[int]) -> None:
        """The next tokens of the answer."""
        if self._final is not None:
            return
        for token_id in token_ids:
            if spelled := self._spell(token_id):
                self._text += spelled
                self._ends.append(len(self._text))
        if self._start is None:
            self._find_opening()
        if self._start is not None:
            self._find_closing(self._start)

    @property
    def count(self) -> int:
        """Of the tokens so far."""
        if self._final is not None:
            return self._final
        start = 0 if self._start is None and self._is_open else self._start
        return 0 if start is None else self._between(start, len(self._text))

    def _spell(self, token_id: int) -> bytes:
        special = self._vocabulary.special_tokens.get(token_id)
        return special.encode() if special in self._tags else self._vocabulary[token_id]

    def _find_opening(self) -> None:
        text = self._text.lstrip()
        if text.startswith(self._opening):
            self._start = len(self._text) - len(text) + len(self._opening)
        elif not self._opening.startswith(text):
            if self._is_open:
                self._start = 0
            else:
                self._end(0)

    def _find_closing(self, start: int) -> None:
        found = self._text.find(self._closing, max(start, self._searched))
        self._searched = len(self._text) - len(self._closing) + 1
        if found >= 0:
            self._end(self._between(start, found))

    def _end(self, count: int) -> None:
        self._final = count
        self._text.clear()
        self._ends = array("Q")

    def _between(self, start: int, end: int) -> int:
        """How many tokens have a byte in [start, end) of the text."""
        if start == end:
            return 0
        return bisect_left(self._ends, end) - bisect_right(self._ends, start) + 1
