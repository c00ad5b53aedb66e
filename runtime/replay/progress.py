"""How far a replay is: a bar on a terminal, else a line every few seconds."""

from __future__ import annotations

import time
from typing import TextIO

BAR_INTERVAL_S = 0.1
LINE_INTERVAL_S = 5.0
BAR_WIDTH = 30


class Progress:
    """Of `total` requests, written to `stream`."""

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self._label = label
        self._total = total
        self._stream = stream
        self._is_terminal = stream.isatty()
        self._interval_s = BAR_INTERVAL_S if self._is_terminal else LINE_INTERVAL_S
        self._num_done = 0
        self._began_at = self._shown_at = time.monotonic()

    def advance(self) -> None:
        """One more request is answered."""
        self._num_done += 1
        now = time.monotonic()
        if now - self._shown_at >= self._interval_s:
            self._shown_at = now
            self._show(now)

    def end(self) -> None:
        """Nothing is left of a bar."""
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    def _show(self, now: float) -> None:
        share = self._num_done / self._total
        left_s = (now - self._began_at) * (1 - share) / share
        text = f"{self._label}: {self._num_done} of {self._total} requests, {left_s:.0f} s left"
        if self._is_terminal:
            bar = ("#" * round(BAR_WIDTH * share)).ljust(BAR_WIDTH)
            self._stream.write(f"\r[{bar}] {text}\x1b[K")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()
