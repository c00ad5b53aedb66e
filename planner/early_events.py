"""Cache events that came before the snapshot they build on, kept back within bounds (sans-IO)."""

from __future__ import annotations

from dynrt.planner.events import BlocksStored, CacheEvents

MAX_EVENTS = 4096
MAX_TOKEN_BYTES = 1 << 20


class EarlyEvents:
    """The runs of events of one worker whose snapshot is awaited."""

    __slots__ = ("_num_events", "_runs", "_token_bytes")

    def __init__(self) -> None:
        self._runs: list[CacheEvents] = []
        self._num_events = self._token_bytes = 0

    def add(self, run: CacheEvents) -> bool:
        """False: there were too many, only this run is kept, and only a newer snapshot can help."""
        self._append(run)
        if self._num_events <= MAX_EVENTS and self._token_bytes <= MAX_TOKEN_BYTES:
            return True
        self._runs.clear()
        self._num_events = self._token_bytes = 0
        self._append(run)
        return False

    def in_order(self) -> list[CacheEvents]:
        return sorted(self._runs, key=lambda run: run.first_seq)

    def _append(self, run: CacheEvents) -> None:
        self._runs.append(run)
        self._num_events += len(run.events)
        self._token_bytes += sum(
            len(event.token_ids) for event in run.events if isinstance(event, BlocksStored)
        )
