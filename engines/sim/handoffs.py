"""Handoffs between simulated engines on one event loop: the real ends, and links that only take time.

To the ends a step has one layer, written when it starts, so that there is one write a step; when that write has
arrived is reckoned layer by layer, as `PrefillEnd` would push them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from dynrt.engines.sim.link import LinkQueue
from dynrt.engines.sim.profile import Profile
from dynrt.engines.sim.timed import TimedStep
from dynrt.transfer.decode_end import DecodeEnd
from dynrt.transfer.effects import Notify, Order, Tell
from dynrt.transfer.ends import Effects, EndEvent, HandoffEnds
from dynrt.transfer.events import ConnectPeer, FromDecodeEnd, FromPrefillEnd, PeerConnected
from dynrt.transfer.layout import KvGeometry
from dynrt.transfer.local import ToCompute
from dynrt.transfer.notifications import UnitsWritten, decode
from dynrt.transfer.prefill_end import PrefillEnd
from dynrt.transfer.write import Write

HOST = "simulated"  # all share one clock

Peers = dict[str, "Handoffs"]  # by incarnation


class Handoffs:
    """What the transfer thread is to an engine process. `peers` are all engines that can be pushed to."""

    def __init__(
        self,
        incarnation: str,
        profile: Profile,
        geometry: KvGeometry,
        peers: Peers,
        tell: Callable[[FromPrefillEnd | FromDecodeEnd], None],
        order: Callable[[ToCompute], None],
    ) -> None:
        self._peers = peers
        self._tell = tell
        self._order = order
        self._link = LinkQueue(profile.link)
        self._prefill = PrefillEnd([_flat(geometry)])
        self._decode = DecodeEnd([_flat(geometry)], HOST)
        self._ends = HandoffEnds(self._prefill, self._decode)
        self._step: TimedStep | None = None
        self._growing: set[int] = set()  # blocks whose KV this step writes
        peers[incarnation] = self

    @property
    def num_open(self) -> int:
        return self._ends.num_open

    # --- from the engine --------------------------------------------------------------------------

    def step_begins(self, step: TimedStep) -> None:
        """Blocks of handoffs are complete, or will be in the course of this step."""
        self._step = step
        self._growing = {
            block_id for ready in step.ready if not ready.written for block_id in ready.block_ids
        }
        self._do(self._prefill.step_begins(step.ready, step.started_at))
        self._do(self._prefill.layer_written(0, step.started_at))
        self._push()

    # --- from the runtime, and of what the engine did for it ----------------------------------------

    def post(self, event: EndEvent | ConnectPeer) -> None:
        if isinstance(event, ConnectPeer):
            flat = [_flat(rank) for rank in event.geometry]
            self._ends.introduce(msgspec.structs.replace(event, geometry=flat))
            if event.will_push:
                self._tell(PeerConnected(event.incarnation))
            return
        self._do(self._ends.on_event(event, _now()))
        self._push()

    # --- writes -----------------------------------------------------------------------------------

    def _push(self) -> None:
        now = _now()
        while (write := self._prefill.next_write(now)) is not None:
            self._prefill.write_posted(write, 0.0)
            arrives_at = self._arrival(write, now)
            asyncio.get_running_loop().call_at(arrives_at, self._arrived, write, now, arrives_at)

    def _arrival(self, write: Write, now: float) -> float:
        """When the link has carried it, its layers no sooner than they are computed."""
        step = self._step
        if step is None or now >= step.ends_at or not self._is_growing(write):
            return self._link.send(now, write.num_bytes)
        layer_bytes = write.num_bytes / step.num_layers
        for layer in range(step.num_layers):
            arrives_at = self._link.send(max(now, step.layer_at(layer)), layer_bytes)
        return arrives_at

    def _is_growing(self, write: Write) -> bool:
        """Whether this step computes what is written."""
        return write.source_pieces[0] // write.route.source.pieces_per_block in self._growing

    def _arrived(self, write: Write, posted_at: float, now: float) -> None:
        self._peers[write.peer].units_written(UnitsWritten(*write.id, write.units), now)
        self._do(self._prefill.write_done(write, posted_at, now))
        self._push()

    def units_written(self, event: UnitsWritten, now: float) -> None:
        """By a peer, into blocks of ours."""
        self._do(self._decode.notified(event, now))

    def _do(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Tell(message):
                    self._tell(message)
                case Order(order):
                    self._order(order)
                case Notify(peer, notification):
                    self._peers[peer].notified(notification)

    def notified(self, notification: bytes) -> None:
        """A peer says that it stopped."""
        self._do(self._decode.notified(decode(notification), _now()))


def _flat(geometry: KvGeometry) -> KvGeometry:
    """All layers as one, of as many bytes."""
    head_size = geometry.head_size * geometry.num_layers
    return msgspec.structs.replace(geometry, num_layers=1, head_size=head_size)


def _now() -> float:
    return asyncio.get_running_loop().time()
