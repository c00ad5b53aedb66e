"""An agent that posts each write some time after it was asked to: what a slow link and an injected fault share."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from dynrt.transfer.agent import Agent, NixlError, WriteState
from dynrt.transfer.events import ConnectPeer
from dynrt.transfer.mapping import KvMapping
from dynrt.transfer.write import Write

ALMOST_DUE_S = 0.2e-3  # the transfer thread's polls are so far apart: one is late at the next
JUST_POSTED_S = 0.1e-3  # over shared memory it is through by then


class DeferredWrite:
    """The handle of a write. Until `due_at` (time.monotonic) it is IN_FLIGHT and its receiver knows nothing of it."""

    def __init__(self, due_at: float, write: Write, notification: bytes) -> None:
        self.due_at = due_at
        self.write = write
        self.notification = notification
        self.handle: Any = None  # the inner agent's, once it was posted
        self.has_failed = False


class DeferringAgent(ABC):
    """An Agent around another. Costs no CPU beyond the transfer thread's own polls."""

    def __init__(self, inner: Agent) -> None:
        self.inner = inner

    @property
    def metadata(self) -> bytes:
        return self.inner.metadata

    @property
    def region_addresses(self) -> list[int]:
        return self.inner.region_addresses

    @property
    def num_polls(self) -> int:
        return self.inner.num_polls

    def connect_peer(self, peer: ConnectPeer, mapping: KvMapping) -> None:
        self.inner.connect_peer(peer, mapping)

    def remove_peer(self, incarnation: str) -> None:
        self.inner.remove_peer(incarnation)

    @abstractmethod
    def post_write(self, write: Write, notification: bytes) -> Any:
        """A DeferredWrite."""

    def poll_write(self, handle: Any) -> WriteState:
        if handle.handle is None and not handle.has_failed:
            early_s = handle.due_at - time.monotonic()
            if early_s > ALMOST_DUE_S:
                return WriteState.IN_FLIGHT
            time.sleep(max(0.0, early_s))
            self.post_now(handle)
            return self._poll_for(handle, JUST_POSTED_S)
        return self._poll_inner(handle)

    def _poll_for(self, handle: DeferredWrite, longest_s: float) -> WriteState:
        """What it was deferred for stands for its way: it does not take the time of another poll beside."""
        polls_until = time.monotonic() + longest_s
        while (state := self._poll_inner(handle)) is WriteState.IN_FLIGHT and time.monotonic() < polls_until:
            pass
        return state

    def _poll_inner(self, handle: DeferredWrite) -> WriteState:
        return WriteState.FAILED if handle.has_failed else self.inner.poll_write(handle.handle)

    def post_now(self, write: DeferredWrite) -> None:
        try:
            write.handle = self.inner.post_write(write.write, write.notification)
        except NixlError:
            write.has_failed = True

    def release_write(self, handle: Any) -> None:
        """One that was never posted is recalled, as nothing of it exists yet."""
        if handle.handle is not None:
            self.inner.release_write(handle.handle)

    def poll_notifications(self) -> list[bytes]:
        return self.inner.poll_notifications()

    def notify(self, peer: str, notification: bytes) -> None:
        self.inner.notify(peer, notification)

    def close(self) -> None:
        self.inner.close()
