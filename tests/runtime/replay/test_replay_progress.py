"""Progress: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from io import StringIO

import pytest

from dynrt.runtime.replay import progress
from dynrt.runtime.replay.progress import LINE_INTERVAL_S, Progress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """One second for each look."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "time", Clock())


def shown(stream: StringIO, count: int, total: int) -> str:
    progress = Progress("planner", total, stream)
    for _ in range(count):
        progress.advance()
    progress.end()
    return stream.getvalue()


def test_elsewhere_a_line_each_five_seconds() -> None:
    lines = shown(StringIO(), 20, 40).splitlines()
    assert len(lines) == 20 / LINE_INTERVAL_S
    assert lines[0] == "planner: 5 of 40 requests, 35 s left"


def test_on_a_terminal_a_bar_that_goes_away() -> None:
    text = shown(Terminal(), 10, 40)
    *bars, last = text.split("\r")[1:]
    assert bars[-1].startswith("[" + "#" * 8 + " " * 22 + "] planner: 10 of 40 requests")
    assert last == "\x1b[K"
    assert "\n" not in text
