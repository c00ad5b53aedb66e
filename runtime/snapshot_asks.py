"""Asking engines for snapshots of their prefix caches, each of them only so often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dynrt.runtime.messages import SnapshotRequest

INTERVAL_S = 5.0  # a snapshot is large, and an engine whose events make no sense would be asked for ever


class SnapshotAsks:
    """A wish that comes too soon after the last is kept and fulfilled later, once."""

    def __init__(self, ask: Callable[[str, SnapshotRequest], None]) -> None:
        self._ask = ask
        self._asked_at: dict[str, float] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def want(self, incarnation: str) -> None:
        """This engine's snapshot is needed."""
        if incarnation in self._timers:
            return
        loop = asyncio.get_running_loop()
        asked_at = self._asked_at.get(incarnation)
        if asked_at is None or loop.time() >= asked_at + INTERVAL_S:
            self._send(incarnation)
        else:
            timer = loop.call_at(asked_at + INTERVAL_S, self._send, incarnation)
            self._timers[incarnation] = timer

    def forget(self, incarnation: str) -> None:
        """The engine has left."""
        self._asked_at.pop(incarnation, None)
        timer = self._timers.pop(incarnation, None)
        if timer is not None:
            timer.cancel()

    def _send(self, incarnation: str) -> None:
        self._timers.pop(incarnation, None)
        self._asked_at[incarnation] = asyncio.get_running_loop().time()
        self._ask(incarnation, SnapshotRequest())
