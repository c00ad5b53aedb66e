"""The transfer thread of a simulated engine: the real ends of the handoff around writes that take virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

from sim_memory import GEOMETRY, SimMemory

from dynrt.transfer import notifications
from dynrt.transfer.decode_end import DecodeEnd
from dynrt.transfer.effects import Notify, Order, Tell
from dynrt.transfer.ends import Effects, EndEvent, HandoffEnds
from dynrt.transfer.events import (
    Arm,
    CancelHandoff,
    ConnectPeer,
    FirstToken,
    FromDecodeEnd,
    FromPrefillEnd,
    HandoffId,
    PeerConnected,
    Retarget,
)
from dynrt.transfer.local import BlocksReady, ReservationMade, ToCompute
from dynrt.transfer.prefill_end import PrefillEnd, Write

POLL_S = 0.02
WRITE_S = (0.0002, 0.05)  # a write's way; bytes of a dead sender land within the longest
NOTICE_S = (0.0001, 0.003)
CONNECT_S = (0.001, 0.05)

TRACED = {
    ReservationMade: "reserved",
    Arm: "armed",
    Retarget: "retargeted",
    FirstToken: "first token known",
    CancelHandoff: "handoff cancelled",
}


class SimFabric:
    """Which engines are there to write to."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.engines: dict[str, SimTransfer] = {}

    def after(self, span_s: tuple[float, float], call: Callable[[], None]) -> None:
        asyncio.get_running_loop().call_later(self.random.uniform(*span_s), call)


class SimTransfer:
    """`is_running` says whether this engine's threads still do anything; its memory is there until it is dead."""

    def __init__(
        self,
        incarnation: str,
        memory: SimMemory,
        fabric: SimFabric,
        tell: Callable[[FromPrefillEnd | FromDecodeEnd], None],
        order: Callable[[ToCompute], None],
        is_running: Callable[[], bool],
        trace: Callable[[str], None],
        takes_first_token: bool,
    ) -> None:
        self.incarnation = incarnation
        self._memory = memory
        self._fabric = fabric
        self._tell = tell
        self._order = order
        self._is_running = lambda: is_running() and self._jammed_at is None
        self._trace = trace
        self._prefill = PrefillEnd([GEOMETRY])
        self._decode = DecodeEnd([GEOMETRY], "simulated", takes_first_token=takes_first_token)
        self._ends = HandoffEnds(self._prefill, self._decode)
        self._is_polling = False
        self._jammed_at: float | None = None
        self._sources: dict[HandoffId, HandoffId] = {}  # of retargeted handoffs: what the engine calls them
        fabric.engines[incarnation] = self

    @property
    def open_handoffs(self) -> int:
        return self._ends.num_open

    def jam(self, now: float) -> None:
        """Its thread does not come back from a call."""
        self._jammed_at = now

    def turn_age_s(self, now: float) -> float:
        return 0.0 if self._jammed_at is None else now - self._jammed_at

    def died(self) -> None:
        del self._fabric.engines[self.incarnation]

    # --- from compute -----------------------------------------------------------------------------

    def step_begins(self, ready: list[BlocksReady]) -> None:
        if self._jammed_at is not None:
            return
        self._do(self._prefill.step_begins(ready, self._now()))

    def layer_written(self, layer: int) -> None:
        if self._jammed_at is not None:
            return
        self._do(self._prefill.layer_written(layer, self._now()))
        self._post_writes()

    def post(self, event: EndEvent | ConnectPeer) -> None:
        if self._jammed_at is not None:
            return
        if isinstance(event, ConnectPeer):
            self._connect(event)
            return
        if isinstance(event, Retarget):
            self._sources[event.new_id] = self._sources.get(event.id, event.id)
        self._do(self._ends.on_event(event, self._now()))
        if type(event) in TRACED:
            self._trace(TRACED[type(event)])
        self._post_writes()
        self._keep_polling()

    def _connect(self, event: ConnectPeer) -> None:
        self._ends.introduce(event)
        self._trace("introduced")
        if event.will_push and self._is_running():
            self._fabric.after(CONNECT_S, lambda: self._connected(event.incarnation))

    def _connected(self, peer: str) -> None:
        if self._is_running():
            error = None if peer in self._fabric.engines else f"{peer} does not answer"
            self._tell(PeerConnected(peer, error))

    # --- writes -----------------------------------------------------------------------------------

    def _post_writes(self) -> None:
        while self._is_running() and (write := self._prefill.next_write(self._now())) is not None:
            self._prefill.write_posted(write, 1e-5)
            self._post(write)
            self._trace("write posted")

    def _post(self, write: Write) -> None:
        layers = range(write.units.first_layer, write.units.first_layer + write.units.num_layers)
        owner = self._sources.get(write.id, write.id)
        content = [
            (target, layer, self._memory.read(owner, source, layer))
            for source, target in zip(write.source_pieces, write.target_pieces, strict=True)
            for layer in layers
        ]
        posted_at = self._now()

        def land() -> None:
            peer = self._fabric.engines.get(write.peer)
            if peer is not None:
                peer.write_lands(write, content)
            self._fabric.after(NOTICE_S, lambda: self._write_ended(write, posted_at, peer is not None))

        self._fabric.after(WRITE_S, land)

    def write_lands(self, write: Write, content: list[tuple[int, int, int | None]]) -> None:
        """Memory changes whatever this engine's threads do; they hear of it at their next poll."""
        for block_id, layer, value in content:
            assert value is not None, "a block was pushed before it was written"
            self._memory.write(write.id, block_id, layer, value)
        packed = notifications.encode_written(*write.id, write.units)
        self._fabric.after(NOTICE_S, lambda: self.notified(packed))

    def notified(self, packed: bytes) -> None:
        if self._is_running():
            self._do(self._decode.notified(notifications.decode(packed), self._now()))
            self._trace("units counted")

    def _write_ended(self, write: Write, posted_at: float, is_done: bool) -> None:
        if not self._is_running():
            return
        if is_done:
            self._do(self._prefill.write_done(write, posted_at, self._now()))
        else:
            self._do(self._prefill.write_failed(write, f"{write.peer} does not answer"))
        self._trace("write ended")
        self._post_writes()

    # --- the loop ---------------------------------------------------------------------------------

    def _keep_polling(self) -> None:
        if self._decode.num_open and not self._is_polling:
            self._is_polling = True
            asyncio.get_running_loop().call_later(POLL_S, self._poll)

    def _poll(self) -> None:
        self._is_polling = False
        if self._is_running():
            self._do(self._decode.polled(self._now()))
            self._keep_polling()

    def _do(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Tell(message):
                    self._tell(message)
                case Order(order):
                    self._order(order)
                case Notify():
                    self._notify(effect)

    def _notify(self, effect: Notify) -> None:
        """Every other one is lost: the runtime relays it anyway."""
        if self._fabric.random.random() < 0.5:
            return

        def arrive() -> None:
            peer = self._fabric.engines.get(effect.peer)
            if peer is not None:
                peer.notified(effect.notification)

        self._fabric.after(NOTICE_S, arrive)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
