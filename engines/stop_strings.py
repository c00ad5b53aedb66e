"""Finds stop strings in text that arrives in pieces, and tells how much of its end may still become one."""

from __future__ import annotations

from collections.abc import Sequence


class StopFinder:
    """Knuth-Morris-Pratt automata side by side: cost per character does not depend on the stop strings' length.

    The stop string that is complete first wins (of two that end together, the longer), so what is found depends
    on the text alone, not on how it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._borders = [_borders(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)  # per stop: how many of its characters the text ends with

    @property
    def held_chars(self) -> int:
        """Length of the longest end of the text that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def feed(self, text: str) -> tuple[int, str] | None:
        """Go through `text` up to the first complete stop string: (index behind it, stop string)."""
        if not self._stops:
            return None
        for index, char in enumerate(text):
            if (stop := self._step(char)) is not None:
                return index + 1, stop
        return None

    def _step(self, char: str) -> str | None:
        found: str | None = None
        for i, stop in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != char:
                matched = self._borders[i][matched - 1]
            self._matched[i] = matched = matched + (stop[matched] == char)
            if matched == len(stop):
                found = found or stop
                self._matched[i] = self._borders[i][-1]
        return found


def _borders(pattern: str) -> list[int]:
    """For each prefix of `pattern`: the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(pattern)
    length = 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = borders[length - 1]
        length += pattern[i] == pattern[length]
        borders[i] = length
    return borders
