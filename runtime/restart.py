"""When to restart what has crashed: a limit within a window, and a growing pause."""

from __future__ import annotations

from collections import deque


class RestartPolicy:
    """Sans-IO: told of each crash with the time, answers with the pause before the restart."""

    def __init__(
        self,
        limit: int = 5,
        window_s: float = 60.0,
        first_pause_s: float = 0.1,
        longest_pause_s: float = 10.0,
    ):
        assert limit >= 1 and 0 < first_pause_s <= longest_pause_s
        self._limit = limit
        self._window_s = window_s
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._crashes: deque[float] = deque()

    def crashed(self, now: float) -> float | None:
        """Seconds to wait before the next start; None once `limit` crashes fell into the window: give up."""
        while self._crashes and self._crashes[0] <= now - self._window_s:
            self._crashes.popleft()
        self._crashes.append(now)
        if len(self._crashes) > self._limit:
            return None
        pause_s = self._first_pause_s * 2.0 ** (len(self._crashes) - 1)
        return min(self._longest_pause_s, pause_s)
