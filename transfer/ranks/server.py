"""In a rank's process: its NIXL agent, whose calls come over a socket, in a thread beside the model's own."""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from dynrt.runtime.errors import RankLostError
from dynrt.transfer.agent import Agent, NixlError, WriteState
from dynrt.transfer.events import ConnectPeer
from dynrt.transfer.layout import KvGeometry, KvRegion
from dynrt.transfer.mapping import KvMapping
from dynrt.transfer.ranks.messages import (
    AgentClosed,
    AgentConnected,
    AgentOpened,
    CloseAgent,
    ConnectAgent,
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

log = logging.getLogger("dynrt.transfer")

POLL_S = 0.2e-3  # as in transfer.thread
POLL_ON_S = 20e-3  # behind a PollOnce that came as soon behind another: by then the next one is here
IDLE_S = 1.0
_PR_SET_PDEATHSIG = 1


class Event(Protocol):
    """A torch.cuda.Event, as far as it is looked at here."""

    def query(self) -> bool: ...


class _Told(NamedTuple):
    """A layer, from the model's thread."""

    done: LayerDone
    event: Event | None


class RankServer:
    """Serves the transfer thread of the engine that listens at `path`, from a thread of its own.

    Dies with it: this process is killed when the process that started it ends, or the socket breaks. Its writes could
    else land in blocks that were given to others meanwhile. `enter`: called first in that thread, to choose a device.
    """

    def __init__(
        self,
        path: str,
        rank: int,
        geometry: KvGeometry,
        regions: Sequence[KvRegion],
        enter: Callable[[], None] = lambda: None,
    ) -> None:
        _die_with_parent()
        self._enter = enter
        self._rank, self._geometry, self._regions = rank, geometry, regions
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(path)
        self._socket = RankSocket[ToRank](connection, ToRank)
        self._agent: Agent | None = None
        self._writes: dict[int, Any] = {}  # NIXL's handles of those that have not ended
        self._layers: deque[_Told] = deque()  # one whose CUDA event is still to come holds up the rest
        self._asked_at = self._poll_until = 0.0  # for a poll; polls by itself until then
        self._news: list[msgspec.Struct] = [Hello(rank, os.getpid(), geometry, regions[0].device)]
        self._closed = False
        self._asleep = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        for file in (self._socket, self._wakeup):
            self._poller.register(file, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="rank-transfer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def layer_written(self, step: int, layer: int, event: Event | None) -> None:
        """From the model's thread; never waits. `event`: happens when the layer is written; None: it is."""
        self._layers.append(_Told(LayerDone(step, layer), event))
        if self._asleep:
            os.eventfd_write(self._wakeup, 1)

    # --- the loop ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._enter()
            while not self._closed:
                self._turn()
                self._wait()
        except RankLostError:
            os.kill(os.getpid(), signal.SIGKILL)
        except BaseException:
            log.exception("rank %d: its transfer thread failed", self._rank)
            os.kill(os.getpid(), signal.SIGKILL)

    def _turn(self) -> None:
        is_asked = self._handle_messages()
        self._tell_layers()
        self._poll_writes()
        self._poll_notifications(is_asked)
        if self._news:
            news, self._news = self._news, []
            self._socket.send(news)

    def _wait(self) -> None:
        if self._writes or self._layers or time.monotonic() < self._poll_until:
            time.sleep(POLL_S)
            return
        self._asleep = True
        woken_by = [] if self._layers else self._poller.poll(1000 * IDLE_S)
        self._asleep = False
        if any(file == self._wakeup for file, _ in woken_by):
            os.eventfd_read(self._wakeup)

    def _tell_layers(self) -> None:
        while self._layers and _has_happened(self._layers[0].event):
            self._news.append(self._layers.popleft().done)

    def _poll_writes(self) -> None:
        for number, handle in list(self._writes.items()):
            state = self._opened.poll_write(handle)
            if state is not WriteState.IN_FLIGHT:
                del self._writes[number]
                self._opened.release_write(handle)
                self._news.append(WriteEnded(number, state is WriteState.FAILED))

    def _poll_notifications(self, is_asked: bool) -> None:
        if not is_asked and time.monotonic() >= self._poll_until:
            return
        notifications = self._opened.poll_notifications()
        if notifications:
            self._news.append(Notified(notifications))
        if is_asked:
            self._news.append(Polled())

    # --- calls ------------------------------------------------------------------------------------

    @property
    def _opened(self) -> Agent:
        assert self._agent is not None, "the agent was not opened"
        return self._agent

    def _handle_messages(self) -> bool:
        """Whether a poll is asked for."""
        is_asked = False
        for message in self._socket.receive():
            if isinstance(message, PollOnce):
                is_asked = True
            else:
                self._handle(message)
        if is_asked:
            self._note_asked(time.monotonic())
        return is_asked

    def _note_asked(self, now: float) -> None:
        """The transfer thread asks every few milliseconds while something can arrive, else every second."""
        if now < self._asked_at + POLL_ON_S:
            self._poll_until = now + POLL_ON_S
        self._asked_at = now

    def _handle(self, message: ToRank) -> None:
        match message:
            case OpenAgent(name, backends):
                self._news.append(self._open(name, backends))
            case ConnectAgent(peer, mapping):
                self._news.append(self._connect(peer, mapping))
            case RemovePeer(incarnation):
                self._opened.remove_peer(incarnation)
            case PostWrite(number, write, notification):
                self._post(number, write, notification)
            case LetGo(number):
                self._let_go(number)
            case SendNotification(peer, notification):
                self._notify(peer, notification)
            case CloseAgent():
                self._close()

    def _open(self, name: str, backends: Sequence[str]) -> AgentOpened:
        from dynrt.transfer.nixl_agent import NixlAgent  # UCX reads its settings when this is imported

        try:
            self._agent = NixlAgent(name, self._rank, self._geometry, self._regions, backends)
        except NixlError as error:
            return AgentOpened(b"", [], str(error))
        return AgentOpened(self._agent.metadata, self._agent.region_addresses)

    def _connect(self, peer: ConnectPeer, mapping: KvMapping) -> AgentConnected:
        try:
            self._opened.connect_peer(peer, mapping)
        except NixlError as error:
            return AgentConnected(str(error))
        return AgentConnected()

    def _post(self, number: int, write: Write, notification: bytes) -> None:
        try:
            self._writes[number] = self._opened.post_write(write, notification)
        except NixlError as error:
            log.warning("rank %d: %s", self._rank, error)
            self._news.append(WriteEnded(number, has_failed=True))

    def _let_go(self, number: int) -> None:
        """It may have ended meanwhile."""
        handle = self._writes.pop(number, None)
        if handle is not None:
            self._opened.release_write(handle)

    def _notify(self, peer: str, notification: bytes) -> None:
        try:
            self._opened.notify(peer, notification)
        except NixlError as error:
            log.info("left to the runtime to relay: %s", error)

    def _close(self) -> None:
        if self._agent is not None:
            self._agent.close()
        self._news.append(AgentClosed())
        self._closed = True


def _has_happened(event: Event | None) -> bool:
    return event is None or event.query()


def _die_with_parent() -> None:
    """Also if this process is stopped, or its threads are busy. Whoever starts it must do so from its main thread."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
