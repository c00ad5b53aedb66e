"""Connections to the peers that are pushed to: made when the runtime says so, made again when a write failed."""

from __future__ import annotations

from collections.abc import Sequence

from dynrt.transfer.agent import Agent, NixlError
from dynrt.transfer.events import ConnectPeer
from dynrt.transfer.mapping import KvMapping

CONNECT_WINDOW_S = 10.0  # how long both ends drive a connection that is being made
# From a write that failed to the first try, and between tries. Most often the peer has died, and by then the runtime
# has said so: to connect to where nobody listens any more costs a file descriptor, which UCX never closes.
RETRY_S = 1.0


class Connections:
    """A worker's peers. Part of the transfer thread."""

    def __init__(self, agents: Sequence[Agent]) -> None:
        self._agents = agents
        self._known: dict[str, tuple[ConnectPeer, KvMapping]] = {}
        self._broken: dict[str, float] = {}  # by peer, when to try again
        self.poll_until = 0.0  # drive the transport until then

    @property
    def broken(self) -> list[str]:
        return list(self._broken)

    def expect(self, now: float) -> None:
        """A connection to or from here is being made."""
        self.poll_until = now + CONNECT_WINDOW_S

    def connect(self, event: ConnectPeer, mapping: KvMapping) -> None:
        """Each rank to those of the peer's that it pushes to. Raises NixlError."""
        for agent in self._agents:
            agent.connect_peer(event, mapping)
        self._known[event.incarnation] = event, mapping

    def notify(self, peer: str, notification: bytes) -> None:
        """By a rank that pushes to `peer`, to one that it pushes to. Raises NixlError."""
        if peer not in self._known:
            raise NixlError(f"{peer} is not connected")
        _, mapping = self._known[peer]
        self._agents[mapping.routes[0].source.rank].notify(peer, notification)

    def break_off(self, peer: str, now: float) -> bool:
        """A write to `peer` failed: its connection is of no use. False if there was none, or this is known."""
        if peer not in self._known or peer in self._broken:
            return False
        self._broken[peer] = now + RETRY_S
        return True

    def is_due(self, peer: str, now: float) -> bool:
        """Whether it is time to make the connection to this broken peer again."""
        return now >= self._broken[peer]

    def renew(self, peer: str, now: float) -> bool:
        """Leave a broken peer and connect to it again; whether that worked."""
        self._broken[peer] = now + RETRY_S
        for agent in self._agents:
            agent.remove_peer(peer)
        try:
            self.connect(*self._known[peer])
        except NixlError:
            return False
        del self._broken[peer]
        self.expect(now)
        return True

    def leave(self, peer: str) -> None:
        """It is dead."""
        self._known.pop(peer, None)
        self._broken.pop(peer, None)
        for agent in self._agents:
            agent.remove_peer(peer)

    def close(self) -> None:
        for agent in self._agents:
            agent.close()
