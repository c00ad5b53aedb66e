"""The transfer thread of an engine process: the one that makes every NIXL call, around both ends of the handoffs."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, cast

from dynrt.transfer import notifications
from dynrt.transfer.agent import NixlError
from dynrt.transfer.agents import open_agents
from dynrt.transfer.checksums import KvChecksums
from dynrt.transfer.connections import Connections
from dynrt.transfer.decode_end import DecodeEnd
from dynrt.transfer.effects import Notify, Order, Tell
from dynrt.transfer.ends import Effects, EndEvent, HandoffEnds
from dynrt.transfer.events import (
    ConnectPeer,
    FencePeer,
    FromDecodeEnd,
    FromPrefillEnd,
    PeerConnected,
)
from dynrt.transfer.layout import KvGeometry, Mismatch
from dynrt.transfer.local import BlocksReady, LayerWritten, StepBegins, ToCompute
from dynrt.transfer.mapping import KvMapping
from dynrt.transfer.memory import RankMemory
from dynrt.transfer.options import TransferOptions
from dynrt.transfer.prefill_end import PrefillEnd
from dynrt.transfer.pusher import Pusher
from dynrt.transfer.trace import TransferTrace

log = logging.getLogger("dynrt.transfer")

POLL_S = 0.2e-3  # while something can arrive: over TCP no byte lands unless the receiver polls
LAST_POLL_S = 50e-6  # while a request waits for its last layer: what that takes longer is exposed
FIRST_POLL_S = 20e-6  # after a post or news of the runtime: over shared memory a small write ends as fast
CONNECT_POLL_S = 50e-3
WATCH_S = 0.25  # between looks for stalled writes and broken connections
IDLE_POLL_S = 1.0

Event = EndEvent | ConnectPeer | StepBegins | LayerWritten


class CudaEvent(Protocol):
    """A torch.cuda.Event, as far as this thread looks at it."""

    def query(self) -> bool: ...


class _Stamped(NamedTuple):
    """An event of a step and when the compute thread told it."""

    event: StepBegins | LayerWritten
    told_at: float


class TransferThread:
    """One per engine process. `geometry` and `memory` have one entry per rank; it registers the memory at once.

    `post`, `step_begins` and `layer_written` may be called from any thread and never wait. The callbacks are called
    on this thread. A failure ends it and is handed to `on_failure`.
    """

    def __init__(
        self,
        incarnation: str,
        geometry: list[KvGeometry],
        memory: Sequence[RankMemory],
        host: str,
        to_runtime: Callable[[FromPrefillEnd | FromDecodeEnd], None],
        to_compute: Callable[[ToCompute], None],
        on_failure: Callable[[BaseException], None],
        options: TransferOptions,
        takes_first_token: bool = True,
    ) -> None:
        num_layers = geometry[0].num_layers
        assert len(geometry) == len(memory) and all(rank.num_layers == num_layers for rank in geometry)
        self._num_layers = num_layers
        self._trace = None if options.trace is None else TransferTrace(Path(options.trace))
        self._agents = open_agents(incarnation, geometry, memory, options)
        checksums = KvChecksums(memory) if options.verify else None
        self._connections = Connections(self._agents)
        self._prefill = PrefillEnd(geometry)
        self._pusher = Pusher(self._prefill, self._agents, checksums, self._trace)
        read_checksum = None if checksums is None else checksums.of_piece
        self._decode = DecodeEnd(geometry, host, read_checksum, takes_first_token)
        self._ends = HandoffEnds(self._prefill, self._decode)
        self._to_runtime = to_runtime
        self._to_compute = to_compute
        self._on_failure = on_failure
        self._inbox: deque[tuple[Event, float]] = deque()
        self._steps: deque[_Stamped] = deque()  # a layer whose CUDA event is still to come holds up the rest
        self._has_more = False  # the last turn posted a write, and there may be another
        self._poll_s = POLL_S  # until the next poll: doubles from poll to poll
        self._num_polls = 0
        self._watch_at = 0.0
        self._turn_began_at: float | None = None
        self._wake_every = 1  # layers of the current step
        self._in_step = False  # compute thread: whether layers told now belong to an announced step
        self._stopping = False
        self._asleep = False
        self._wakeup = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._wakeup, select.POLLIN)
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)

    # --- from other threads -----------------------------------------------------------------------

    @property
    def agent_metadata(self) -> list[bytes]:
        return [agent.metadata for agent in self._agents]

    @property
    def region_addresses(self) -> list[list[int]]:
        return [agent.region_addresses for agent in self._agents]

    @property
    def open_handoffs(self) -> int:
        return self._ends.num_open

    @property
    def turn_age_s(self) -> float:
        """How long it has been in its present turn: a call of NIXL's may never come back."""
        began_at = self._turn_began_at
        return 0.0 if began_at is None else time.monotonic() - began_at

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread; handoffs still open are abandoned, as the process is about to end."""
        self._stopping = True
        os.eventfd_write(self._wakeup, 1)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            os.close(self._wakeup)

    def post(self, event: Event) -> None:
        self._inbox.append((event, time.monotonic()))
        if self._asleep:
            os.eventfd_write(self._wakeup, 1)

    def step_begins(self, ready: list[BlocksReady]) -> None:
        """Engine hook, from the compute thread."""
        self._in_step = True
        self.post(StepBegins(ready))

    def layer_written(self, layer: int, event: object | None) -> None:
        """Engine hook, from the compute thread. Layers that nothing is posted for do not wake this thread."""
        if not self._in_step:
            return
        self._in_step = layer < self._num_layers - 1
        if self._in_step and (layer + 1) % self._wake_every:
            self._inbox.append((LayerWritten(layer, event), time.monotonic()))
        else:
            self.post(LayerWritten(layer, event))

    # --- the loop ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn_began_at = time.monotonic()
                self._turn()
                self._turn_began_at = None
                self._wait()
            self._connections.close()
            if self._trace is not None:
                self._trace.close()
        except BaseException as error:
            log.exception("transfer thread failed")
            self._on_failure(error)

    def _turn(self) -> None:
        self._read_inbox()
        self._follow_steps()
        self._post_write()
        self._do(self._pusher.poll())
        self._poll_notifications()
        self._watch()

    def _wait(self) -> None:
        wait_s = self._wait_s()
        if wait_s > POLL_S:
            self._sleep(wait_s)
        elif wait_s > 0:
            longest_s = LAST_POLL_S if self._decode.awaits_last_layer else POLL_S
            self._poll_s = min(self._poll_s, longest_s)
            time.sleep(self._poll_s)
            self._poll_s = min(2 * self._poll_s, POLL_S)

    def _sleep(self, longest_s: float) -> None:
        """Until something is posted."""
        if self._trace is not None:
            self._trace.asleep(time.monotonic(), time.thread_time())
        self._asleep = True
        if not self._inbox and not self._stopping and self._poller.poll(1000 * longest_s):
            os.eventfd_read(self._wakeup)
        self._asleep = False

    def _wait_s(self) -> float:
        if self._inbox or self._has_more:
            return 0.0
        if self._decode.num_open or self._pusher.has_posted or self._steps:
            return POLL_S
        if time.monotonic() < self._connections.poll_until or self._connections.broken:
            return CONNECT_POLL_S
        return IDLE_POLL_S

    def _read_inbox(self) -> None:
        while self._inbox:
            event, told_at = self._inbox.popleft()
            if isinstance(event, StepBegins | LayerWritten):
                self._steps.append(_Stamped(event, told_at))
            else:
                self._on_event(event)

    def _on_event(self, event: EndEvent | ConnectPeer) -> None:
        if isinstance(event, ConnectPeer):
            self._connect(event)
            return
        self._poll_s = FIRST_POLL_S
        self._do(self._ends.on_event(event, time.monotonic()))
        if isinstance(event, FencePeer):
            self._pusher.let_go(event.incarnation)
            self._connections.leave(event.incarnation)

    def _connect(self, event: ConnectPeer) -> None:
        self._connections.expect(time.monotonic())
        mapping = self._ends.introduce(event)
        if event.will_push:
            self._to_runtime(PeerConnected(event.incarnation, self._try_connect(event, mapping)))

    def _try_connect(self, event: ConnectPeer, mapping: KvMapping | Mismatch) -> str | None:
        """Why that did not work, if it did not."""
        if isinstance(mapping, Mismatch):
            return str(mapping)
        try:
            self._connections.connect(event, mapping)
        except NixlError as failure:
            return str(failure)
        return None

    def _watch(self) -> None:
        """What need not be looked at in every turn."""
        for peer in self._pusher.broken_peers:
            self._break_off(peer)
        self._pusher.broken_peers.clear()
        now = time.monotonic()
        if now < self._watch_at:
            return
        self._watch_at = now + WATCH_S
        self._do(self._prefill.polled(now))
        for peer in self._connections.broken:
            self._renew(peer, now)

    def _break_off(self, peer: str) -> None:
        """Nobody shall plan handoffs to `peer` until its connection stands again."""
        if self._connections.break_off(peer, time.monotonic()):
            log.warning("connection to %s is broken, making it again", peer)
            self._prefill.hold(peer)
            self._to_runtime(PeerConnected(peer, "a write failed; the connection is being made again"))

    def _renew(self, peer: str, now: float) -> None:
        is_quiet = self._prefill.num_unfinished(peer) == 0
        if is_quiet and self._connections.is_due(peer, now) and self._connections.renew(peer, now):
            self._prefill.resume(peer)
            self._to_runtime(PeerConnected(peer))

    def _follow_steps(self) -> None:
        while self._steps and _has_happened(self._steps[0].event):
            event, told_at = self._steps.popleft()
            if isinstance(event, StepBegins):
                self._note_step(event, told_at)
                self._do(self._prefill.step_begins(event.ready, told_at))
                self._wake_every = self._prefill.layers_per_push
            else:
                written_at = told_at if event.event is None else time.monotonic()
                self._note_written(event.layer, written_at)
                self._do(self._prefill.layer_written(event.layer, written_at))

    def _note_step(self, event: StepBegins, at: float) -> None:
        if self._trace is not None:
            self._trace.step(sum(len(blocks.block_ids) for blocks in event.ready if not blocks.written), at)

    def _note_written(self, layer: int, at: float) -> None:
        if self._trace is not None:
            self._trace.written(layer, at)

    def _post_write(self) -> None:
        """At most one in a turn, so that a long backlog keeps neither news nor notifications waiting."""
        effects = self._pusher.post_next()
        self._has_more = effects is not None
        if effects is not None:
            self._poll_s = FIRST_POLL_S
            self._do(effects)

    def _poll_notifications(self) -> None:
        for agent in self._agents:
            for packed in agent.poll_notifications():
                self._on_notification(packed)
        num_polls = min(agent.num_polls for agent in self._agents)
        if num_polls > self._num_polls:  # all ranks have polled again
            self._num_polls = num_polls
            self._do(self._decode.polled(time.monotonic()))

    def _on_notification(self, packed: bytes) -> None:
        try:
            notification = notifications.decode(packed)
        except notifications.MalformedNotificationError as error:
            log.warning("notification dropped: %s", error)
            return
        received_at = time.monotonic()
        if self._trace is not None and isinstance(notification, notifications.UnitsWritten):
            self._trace.moved("received", notification.key, notification.units, received_at)
        self._do(self._decode.notified(notification, received_at))

    def _do(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Tell(message):
                    self._to_runtime(message)
                case Order(order):
                    self._to_compute(order)
                case Notify():
                    self._notify(effect)

    def _notify(self, effect: Notify) -> None:
        try:
            self._connections.notify(effect.peer, effect.notification)
        except NixlError as error:
            log.info("left to the runtime to relay: %s", error)


def _has_happened(event: StepBegins | LayerWritten) -> bool:
    if isinstance(event, StepBegins) or event.event is None:
        return True
    cuda_event = cast(CudaEvent, event.event)
    return cuda_event.query()
