"""What an endpoint has answered, counted where it happens and told to the runtime, which has the metrics."""

from __future__ import annotations

import msgspec

Answer = tuple[str, int]  # (route, HTTP status)
NO_ROUTE = "none"  # of requests that came to none


class HttpCounts(msgspec.Struct, frozen=True, array_like=True):
    """News since the last of them."""

    answers: list[tuple[Answer, int]] = []
    connections: int = 0  # opened, less closed


class HttpCounter:
    """One per endpoint. Routes are those of the table, so there are few."""

    def __init__(self) -> None:
        self._answers: dict[Answer, int] = {}
        self._connections = 0

    def answered(self, route: str, status: int) -> None:
        answer = route, status
        self._answers[answer] = self._answers.get(answer, 0) + 1

    def connected(self) -> None:
        self._connections += 1

    def disconnected(self) -> None:
        self._connections -= 1

    def take(self) -> HttpCounts:
        """All since the last call."""
        counts = HttpCounts(list(self._answers.items()), self._connections)
        self._answers, self._connections = {}, 0
        return counts
