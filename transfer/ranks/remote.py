"""A rank in another process, as the transfer thread sees it: its agent, and how far its KV is written."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TypeVar

from dynrt.runtime.errors import RankLostError
from dynrt.transfer.agent import NixlError, WriteState
from dynrt.transfer.events import ConnectPeer
from dynrt.transfer.mapping import KvMapping
from dynrt.transfer.ranks.messages import (
    AgentClosed,
    AgentConnected,
    AgentOpened,
    CloseAgent,
    ConnectAgent,
    FromRank,
    Hello,
    LayerDone,
    LetGo,
    Notified,
    OpenAgent,
    Polled,
    PollOnce,
    PostWrite,
    RemovePeer,
    SendNotification,
    ToRank,
    WriteEnded,
)
from dynrt.transfer.ranks.rank_socket import RankSocket
from dynrt.transfer.write import Write

ANSWER_LIMIT_S = 30.0  # setting NIXL up and connecting take milliseconds
CLOSE_LIMIT_S = 3.0
POLL_EVERY_S = 5e-3  # how often a rank is asked to poll; it goes on by itself in between

A = TypeVar("A", AgentOpened, AgentConnected, AgentClosed)


class RemoteRank:
    """An Agent, once it was opened; transfer.nixl_agent.NixlAgent says what each method does.

    A write that cannot be posted is one that has failed at its first polls. All methods may raise RankLostError; then
    the other ranks of its model are let go of, and die of it: they would wait for this one for ever.
    """

    metadata: bytes
    region_addresses: list[int]

    def __init__(self, socket: RankSocket[FromRank], timeout_s: float) -> None:
        self._socket = socket
        self._siblings: Sequence[RemoteRank] = ()
        self._answers: list[AgentOpened | AgentConnected | AgentClosed] = []
        self._peers: set[str] = set()
        self._last_number = 0
        self._ended: dict[int, WriteState] = {}
        self._in_flight: set[int] = set()
        self._notifications: list[bytes] = []
        self._is_polling = False
        self._poll_at = 0.0
        self.num_polls = 0
        self.written = (0, 0)  # the last layer of which this rank's part is written: step, layer
        hello = self._hello(timeout_s)
        self.rank, self.pid, self.geometry, self.device = hello.rank, hello.pid, hello.geometry, hello.device

    def join(self, ranks: Sequence[RemoteRank]) -> None:
        """All ranks of its model, with itself."""
        self._siblings = ranks

    def open(self, name: str, backends: Sequence[str]) -> None:
        """Before anything else. Raises NixlError."""
        self._send(OpenAgent(name, tuple(backends)))
        opened = self._await(AgentOpened, ANSWER_LIMIT_S)
        if opened.error is not None:
            raise NixlError(opened.error)
        self.metadata, self.region_addresses = opened.metadata, opened.region_addresses

    def connect_peer(self, peer: ConnectPeer, mapping: KvMapping) -> None:
        self._send(ConnectAgent(peer, mapping))
        connected = self._await(AgentConnected, ANSWER_LIMIT_S)
        if connected.error is not None:
            raise NixlError(connected.error)
        self._peers.add(peer.incarnation)

    def remove_peer(self, incarnation: str) -> None:
        self._peers.discard(incarnation)
        self._send(RemovePeer(incarnation))

    def post_write(self, write: Write, notification: bytes) -> Any:
        self._last_number += 1
        self._send(PostWrite(self._last_number, write, notification))
        self._in_flight.add(self._last_number)
        return self._last_number

    def poll_write(self, handle: Any) -> WriteState:
        self.read()
        return self._ended.get(handle, WriteState.IN_FLIGHT)

    def release_write(self, handle: Any) -> None:
        if self._ended.pop(handle, None) is None:
            self._in_flight.discard(handle)
            self._send(LetGo(handle))

    def poll_notifications(self) -> list[bytes]:
        self.read()
        now = time.monotonic()
        if not self._is_polling and now >= self._poll_at:
            self._send(PollOnce())
            self._is_polling, self._poll_at = True, now + POLL_EVERY_S
        notifications, self._notifications = self._notifications, []
        return notifications

    def notify(self, peer: str, notification: bytes) -> None:
        if peer not in self._peers:
            raise NixlError(f"{peer} is not connected")
        self._send(SendNotification(peer, notification))

    def close(self) -> None:
        self._send(CloseAgent())
        self._await(AgentClosed, CLOSE_LIMIT_S)
        self.let_go()

    def let_go(self) -> None:
        """Its process dies of it, unless the agent was closed before."""
        self._socket.close()

    # --- what the rank says -----------------------------------------------------------------------

    def read(self) -> None:
        """Take in what has come; waits for nothing."""
        try:
            messages = self._socket.receive()
        except RankLostError:
            self._let_all_go()
            raise
        for message in messages:
            self._on_message(message)

    def _send(self, message: ToRank) -> None:
        try:
            self._socket.send([message])
        except RankLostError:
            self._let_all_go()
            raise

    def _let_all_go(self) -> None:
        for rank in self._siblings:
            rank.let_go()

    def _on_message(self, message: FromRank) -> None:
        match message:
            case WriteEnded(number, has_failed):
                self._on_ended(number, WriteState.FAILED if has_failed else WriteState.DONE)
            case Notified(notifications):
                self._notifications += notifications
            case Polled():
                self._is_polling = False
                self.num_polls += 1
            case LayerDone(step, layer):
                self.written = (step, layer)
            case AgentOpened() | AgentConnected() | AgentClosed():
                self._answers.append(message)
            case Hello():
                raise AssertionError(f"rank {self.rank} says hello again")

    def _on_ended(self, number: int, state: WriteState) -> None:
        """A write that was let go of meanwhile is not looked at any more."""
        if number in self._in_flight:
            self._in_flight.remove(number)
            self._ended[number] = state

    def _hello(self, timeout_s: float) -> Hello:
        if not self._socket.wait(timeout_s):
            raise RankLostError(f"a rank has connected and says nothing for {timeout_s:g} s")
        first, *others = self._socket.receive()
        assert isinstance(first, Hello) and not others, f"a rank says {first} first, not hello"
        return first

    def _await(self, kind: type[A], timeout_s: float) -> A:
        """One call is answered at a time."""
        deadline = time.monotonic() + timeout_s
        while not self._answers:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not self._socket.wait(left_s):
                self._let_all_go()
                raise RankLostError(
                    f"rank {self.rank} (pid {self.pid}) does not answer within {timeout_s:g} s"
                )
            self.read()
        answer = self._answers.pop()
        assert isinstance(answer, kind), f"{answer} instead of {kind.__name__}"
        return answer


class StepLayer:
    """As a CUDA event: happens when every rank has written its part of a layer in that step."""

    def __init__(self, ranks: Sequence[RemoteRank], step: int, layer: int) -> None:
        self._ranks = ranks
        self._reached = step, layer

    def query(self) -> bool:
        for rank in self._ranks:
            rank.read()
        return all(rank.written >= self._reached for rank in self._ranks)
