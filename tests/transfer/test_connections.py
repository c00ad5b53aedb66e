"""Connections to peers: what is left when a peer dies, and how a broken one is made again."""

from __future__ import annotations

from typing import Any, cast

from dynrt.transfer.agent import Agent, NixlError
from dynrt.transfer.connections import RETRY_S, Connections
from dynrt.transfer.events import ConnectPeer
from dynrt.transfer.mapping import KvMapping

PEER = ConnectPeer("peer", [], [], [], will_push=True)
MAPPING = cast(KvMapping, None)  # passed on, not looked into


class CountingAgent:
    """Knows the peers that it holds something for."""

    def __init__(self) -> None:
        self.peers: set[str] = set()
        self.is_refusing = False

    def connect_peer(self, event: ConnectPeer, mapping: KvMapping) -> None:
        if self.is_refusing:
            raise NixlError("unreachable")
        assert event.incarnation not in self.peers, "an agent's name is taken once"
        self.peers.add(event.incarnation)

    def remove_peer(self, peer: str) -> None:
        self.peers.discard(peer)


def connected(num_ranks: int = 2) -> tuple[Connections, list[CountingAgent]]:
    agents: list[Any] = [CountingAgent() for _ in range(num_ranks)]
    connections = Connections(cast(list[Agent], agents))
    connections.connect(PEER, MAPPING)
    return connections, agents


def test_the_loss_of_a_peer_itself_gives_its_memory_back() -> None:
    """A decode worker keeps a dead prefill's memory mapped until the next one connects, which cannot start for it."""
    connections, agents = connected()
    connections.leave("peer")
    assert not any(agent.peers for agent in agents)
    assert not connections.break_off("peer", 1.0), "nothing is to be made again"
    connections.leave("peer")


def test_a_peer_that_comes_back_is_connected_anew() -> None:
    connections, agents = connected()
    connections.leave("peer")
    connections.connect(PEER, MAPPING)
    assert all(agent.peers == {"peer"} for agent in agents)


def test_a_broken_connection_is_tried_until_it_stands() -> None:
    connections, (agent,) = connected(num_ranks=1)
    assert connections.break_off("peer", 1.0) and not connections.break_off("peer", 1.0), "known"
    assert not connections.is_due("peer", 1.0 + RETRY_S / 2), "its death may not be known yet"
    agent.is_refusing = True
    at = 1.0 + RETRY_S
    assert connections.is_due("peer", at) and not connections.renew("peer", at)
    assert connections.broken == ["peer"] and not connections.is_due("peer", at + RETRY_S / 2)
    agent.is_refusing = False
    assert connections.is_due("peer", at + RETRY_S) and connections.renew("peer", at + RETRY_S)
    assert connections.broken == [] and agent.peers == {"peer"}
