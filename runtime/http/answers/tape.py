"""Text that arrives in pieces, for parsers that are generators: they yield when they have read all there is."""

from __future__ import annotations

import re
from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Reading = Generator[None, None, Result]

SPACE = re.compile(r"\s*")
REST = re.compile(r".*", re.DOTALL)


class Tape:
    """Holds what was put and not taken yet; `mark` is how much of it has been read."""

    def __init__(self) -> None:
        self._text = ""
        self.mark = 0
        self.ended = False  # nothing will be put any more

    def put(self, piece: str) -> None:
        assert not self.ended, "the text has ended"
        self._text += piece

    @property
    def read(self) -> str:
        """What was read and not taken."""
        return self._text[: self.mark]

    def take(self, num_chars: int | None = None) -> str:
        """Take the first `num_chars` of what was read off the tape; all of it by default."""
        end = self.mark if num_chars is None else num_chars
        assert end <= self.mark, "only what was read can be taken"
        taken, self._text = self._text[:end], self._text[end:]
        self.mark -= end
        return taken

    def peek(self) -> Reading[str]:
        """The next character, which stays unread; empty at the end."""
        while self.mark == len(self._text) and not self.ended:
            yield
        return self._text[self.mark : self.mark + 1]

    def skip(self) -> None:
        """Read the character that was peeked at."""
        assert self.mark < len(self._text), "there is no next character"
        self.mark += 1

    def read_while(self, chars: re.Pattern[str]) -> Reading[str]:
        """Read the characters that `chars`, a repeated character class, matches."""
        pieces: list[str] = []
        while True:
            match = chars.match(self._text, self.mark)
            assert match is not None, "the pattern must match nothing as well"
            self.mark = match.end()
            pieces.append(match[0])
            if self.mark < len(self._text) or self.ended:
                return "".join(pieces)
            yield

    def accept(self, literal: str) -> Reading[bool]:
        """Read `literal` if it is next."""
        while (there := self._text[self.mark : self.mark + len(literal)]) != literal:
            if self.ended or not literal.startswith(there):
                return False
            yield
        self.mark += len(literal)
        return True

    def accept_spaced(self, literal: str) -> Reading[bool]:
        """Read white space and `literal` if they are next; else nothing. Nothing may be taken meanwhile."""
        before = self.mark
        yield from self.read_while(SPACE)
        if (yield from self.accept(literal)):
            return True
        self.mark = before
        return False

    def read_until(self, marker: str) -> Reading[bool]:
        """Read up to `marker`, which stays unread; False if it does not come. An end that may begin it waits."""
        while True:
            found = self._text.find(marker, self.mark)
            if found >= 0:
                self.mark = found
                return True
            if self.ended:
                self.mark = len(self._text)
                return False
            self.mark = len(self._text) - _overlap(self._text[self.mark :], marker)
            yield


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` begins with."""
    longest = min(len(text), len(marker) - 1)
    return next((size for size in range(longest, 0, -1) if marker.startswith(text[-size:])), 0)
