"""The decode end of all handoffs of one worker: what has arrived, and when reserved blocks are the request's or free.

Sans-IO: events and the time go in, effects come out. The table of states and events is docs/handoff.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import product
from typing import Literal, Protocol

from dynrt.transfer.bounded import BoundedDict
from dynrt.transfer.effects import DecodeEffect, Order, Tell
from dynrt.transfer.events import (
    CancelHandoff,
    Cause,
    Committed,
    Drained,
    FirstToken,
    HandoffId,
    LeaseExpired,
    PeerQuiesced,
    RenewLease,
    Reserved,
)
from dynrt.transfer.layout import KvGeometry, Mismatch
from dynrt.transfer.local import CommitBlocks, ReleaseBlocks, ReservationMade
from dynrt.transfer.mapping import KvMapping, Slice, map_kv, pieces_of
from dynrt.transfer.notifications import Notification, SenderQuiesced, UnitsWritten
from dynrt.transfer.units import UnitSet

TOMBSTONES = 8192  # ended handoffs remembered, so that nothing late can open them again
DEAD_PEERS = 1024  # fenced incarnations remembered, for reservations that were on their way when they died
EARLY_FIRST_TOKENS = 4096  # kept for reservations that are still to be made
QUIET_POLLS = 3
QUIET_S = 0.1  # a dead sender's last bytes were seen to land within the first polls


class DecodeState(Enum):
    """States that still hold blocks; COMMITTED and DRAINED hold none here and leave a tombstone."""

    RECEIVING = auto()  # RESERVED until the first unit is counted
    CANCELLING = auto()  # waits for the prefill end's word that it writes no more
    FENCED = auto()  # the sender cannot write any more; waits until what it had sent has landed


@dataclass
class _Handoff:
    reservation: ReservationMade
    mapping: KvMapping  # of the peer's KV onto ours
    piece_ids: list[int]  # ours, that are to be written
    units: UnitSet
    lease_until: float
    last_unit_at: float
    state: DecodeState = DecodeState.RECEIVING
    first_token: FirstToken | None = None
    reason: str = ""
    cause: Cause = "cancelled"
    checksums: dict[tuple[int, int, int], int] = field(default_factory=dict)  # as they were sent, by unit
    quiet_polls: int = 0  # FENCED: polls since anything was new
    quiet_since: float = 0.0

    @property
    def id(self) -> HandoffId:
        return self.reservation.key, self.reservation.epoch

    @property
    def is_complete(self) -> bool:
        """Every unit was counted: nothing of this handoff can be in flight."""
        return self.units.missing == 0

    @property
    def awaits_last_layer(self) -> bool:
        """Or as much of others."""
        layer_units = len(self.mapping.routes) * len(self.piece_ids)
        return self.state is DecodeState.RECEIVING and 0 < self.units.missing <= layer_units


class ReadChecksum(Protocol):
    """What lies in a route's part of a piece of a layer now."""

    def __call__(self, cells: Slice, layer: int, piece_id: int) -> int: ...


class DecodeEnd:
    """All handoffs whose blocks are reserved here. `geometry`: of this worker's ranks.

    `host` names the clock that `received_at` is read from. With `read_checksum`, a handoff is committed only if every
    piece is what was sent. An engine that does not take a first token samples it itself: all units are then all that
    its handoffs wait for.
    """

    def __init__(
        self,
        geometry: Sequence[KvGeometry],
        host: str,
        read_checksum: ReadChecksum | None = None,
        takes_first_token: bool = True,
    ) -> None:
        self._geometry = geometry
        self._mappings: dict[str, KvMapping] = {}  # by peer
        self._host = host
        self._read_checksum = read_checksum
        self._takes_first_token = takes_first_token
        self._open: dict[HandoffId, _Handoff] = {}
        self._ended: BoundedDict[HandoffId, Literal["committed", "drained"]] = BoundedDict(TOMBSTONES)
        self._dead_peers: BoundedDict[str, None] = BoundedDict(DEAD_PEERS)
        self._early_tokens: BoundedDict[HandoffId, FirstToken] = BoundedDict(EARLY_FIRST_TOKENS)
        self.awaits_last_layer = False  # of some handoff, when it was polled last

    @property
    def num_open(self) -> int:
        return len(self._open)

    def knows(self, handoff_id: HandoffId) -> bool:
        """Whether it is open here, or was."""
        return handoff_id in self._open or handoff_id in self._ended

    def introduce(self, peer: str, geometry: Sequence[KvGeometry]) -> KvMapping | Mismatch:
        """`peer`'s ranks, before anything is reserved for what it pushes."""
        mapping = map_kv(geometry, self._geometry)
        if isinstance(mapping, KvMapping):
            self._mappings[peer] = mapping
        return mapping

    # --- from the compute thread ------------------------------------------------------------------

    def reserved(self, event: ReservationMade, now: float) -> list[DecodeEffect]:
        """Blocks were set aside; from the answer on, the peer may write to them."""
        handoff_id = event.key, event.epoch
        if handoff_id in self._ended:  # cancelled before: the peer never hears of these blocks
            return [Order(ReleaseBlocks(*handoff_id))]
        if event.peer in self._dead_peers:
            return self._turn_away(handoff_id, f"prefill worker {event.peer} is dead", "fenced")
        if event.peer not in self._mappings:
            return self._turn_away(handoff_id, f"{event.peer} was never introduced", "refused")
        assert handoff_id not in self._open, f"{event.key.hex()}:{event.epoch} was reserved twice"
        handoff = _open(event, self._mappings[event.peer], now)
        handoff.first_token = self._early_tokens.pop(handoff_id, None)
        self._open[handoff_id] = handoff
        answer = Reserved(*handoff_id, event.first_block, event.block_ids, event.num_prompt_tokens)
        return [Tell(answer), *self._commit_if_ready(handoff)]

    def _turn_away(self, handoff_id: HandoffId, reason: str, cause: Cause) -> list[DecodeEffect]:
        """Nobody was told of its blocks."""
        self._ended[handoff_id] = "drained"
        return [Order(ReleaseBlocks(*handoff_id)), Tell(Drained(*handoff_id, reason, cause))]

    # --- from the runtime -------------------------------------------------------------------------

    def first_token(self, event: FirstToken) -> list[DecodeEffect]:
        """The token that the client saw. It can come before the reservation is made, and before the last unit."""
        handoff = self._open.get(event.id)
        if handoff is not None:
            handoff.first_token = event
            return self._commit_if_ready(handoff)
        if event.id not in self._ended:
            self._early_tokens[event.id] = event
        return []

    def peer_quiesced(self, event: PeerQuiesced | SenderQuiesced, now: float) -> list[DecodeEffect]:
        """The prefill end, or the runtime for it: nothing is in flight, nothing will be posted again."""
        handoff = self._open.get(event.id)
        if handoff is None or handoff.is_complete or handoff.state is DecodeState.FENCED:
            return []
        if not handoff.reason:
            handoff.reason, handoff.cause = "the prefill end stopped before it had sent all", "transport"
        if event.clean:
            return self._drain(handoff)
        self._fence(handoff, now)
        return []

    def cancel(self, event: CancelHandoff) -> list[DecodeEffect]:
        """Give up. Frees at once if nothing can be in flight; after COMMITTED the engine's abort deals with it."""
        handoff = self._open.get(event.id)
        if handoff is not None:
            return self._cancel(handoff, event.reason, "cancelled")
        if self._ended.get(event.id) == "committed":
            return []
        self._early_tokens.pop(event.id, None)
        self._ended[event.id] = "drained"
        return [Tell(Drained(*event.id, event.reason))]

    def fence(self, incarnation: str, now: float) -> None:
        """That peer's process has ended; what its connection still holds can land at the next polls."""
        self._dead_peers[incarnation] = None
        self._mappings.pop(incarnation, None)
        for handoff in self._open.values():
            is_affected = handoff.reservation.peer == incarnation and not handoff.is_complete
            if not is_affected or handoff.state is DecodeState.FENCED:
                continue
            if not handoff.reason:
                handoff.reason, handoff.cause = f"prefill worker {incarnation} is dead", "fenced"
            self._fence(handoff, now)

    def renew(self, event: RenewLease, now: float) -> None:
        """The runtime still wants these."""
        for handoff_id in event.ids:
            handoff = self._open.get(handoff_id)
            if handoff is not None:
                handoff.lease_until = now + event.lease_s

    # --- from NIXL and the clock ------------------------------------------------------------------

    def notified(self, event: Notification, now: float) -> list[DecodeEffect]:
        """One notification was read."""
        if isinstance(event, SenderQuiesced):
            return self.peer_quiesced(event, now)
        return self._written(event, now)

    def _written(self, event: UnitsWritten, now: float) -> list[DecodeEffect]:
        handoff = self._open.get(event.id)
        if handoff is None:  # ended; it cannot be early, since the peer learns its target from our Reserved
            return []
        missing_before = handoff.units.missing
        handoff.units.add(event.units)
        if handoff.units.missing == missing_before:
            return []
        handoff.last_unit_at = now
        if self._read_checksum is not None:
            _note_checksums(handoff, event)
        handoff.quiet_polls, handoff.quiet_since = 0, now
        if handoff.state is DecodeState.CANCELLING and handoff.is_complete:
            return self._drain(handoff)
        return self._commit_if_ready(handoff)

    def polled(self, now: float) -> list[DecodeEffect]:
        """NIXL was polled and all that it brought was passed to `notified`."""
        effects: list[DecodeEffect] = []
        self.awaits_last_layer = any(handoff.awaits_last_layer for handoff in self._open.values())
        for handoff in list(self._open.values()):
            if handoff.state is DecodeState.FENCED:
                effects += self._polled_fenced(handoff, now)
            elif now >= handoff.lease_until:
                effects += self._lease_over(handoff, now)
        return effects

    def _lease_over(self, handoff: _Handoff, now: float) -> list[DecodeEffect]:
        reservation = handoff.reservation
        handoff.lease_until = now + reservation.lease_s
        expired = LeaseExpired(*handoff.id, reservation.peer)
        return [Tell(expired), *self._cancel(handoff, "the lease expired", "lease")]

    def _polled_fenced(self, handoff: _Handoff, now: float) -> list[DecodeEffect]:
        handoff.quiet_polls += 1
        if handoff.quiet_polls < QUIET_POLLS or now - handoff.quiet_since < QUIET_S:
            return []
        return self._drain(handoff)

    # --- transitions ------------------------------------------------------------------------------

    def _cancel(self, handoff: _Handoff, reason: str, cause: Cause) -> list[DecodeEffect]:
        if not handoff.reason:
            handoff.reason, handoff.cause = reason, cause
        if handoff.is_complete:
            return self._drain(handoff)
        if handoff.state is DecodeState.RECEIVING:
            handoff.state = DecodeState.CANCELLING
        return []

    def _fence(self, handoff: _Handoff, now: float) -> None:
        handoff.state = DecodeState.FENCED
        handoff.quiet_polls, handoff.quiet_since = 0, now

    def _commit_if_ready(self, handoff: _Handoff) -> list[DecodeEffect]:
        first = handoff.first_token
        waits = first is None and self._takes_first_token
        if handoff.state is not DecodeState.RECEIVING or not handoff.is_complete or waits:
            return []
        fault = self._find_corruption(handoff)
        if fault is not None:
            handoff.reason, handoff.cause = fault, "checksum"
            return self._drain(handoff)
        self._forget(handoff, "committed")
        order = CommitBlocks(*handoff.id, None if first is None else first.token_id)
        # Told first: the request may end with the very next step, and the runtime must know by then that it was
        # committed. Should the runtime cancel meanwhile, the compute thread knows that a drop can cross a commit.
        return [Tell(Committed(*handoff.id, handoff.last_unit_at, self._host)), Order(order)]

    def _find_corruption(self, handoff: _Handoff) -> str | None:
        """The first unit that is not what was sent; None if all are, or nobody asked."""
        if self._read_checksum is None:
            return None
        mapping, layers = handoff.mapping, range(handoff.mapping.num_layers)
        for (index, route), layer in product(enumerate(mapping.routes), layers):
            for piece, piece_id in enumerate(handoff.piece_ids):
                sent = handoff.checksums.get((index, layer, piece))
                found = self._read_checksum(route.target, layer, piece_id)
                if sent != found:
                    block_id = piece_id // mapping.target_pieces_per_block
                    where = f"rank {route.target.rank}, layer {layer}, block {block_id}"
                    return f"{where} has checksum {found}, sent was {sent}"
        return None

    def _drain(self, handoff: _Handoff) -> list[DecodeEffect]:
        self._forget(handoff, "drained")
        drained = Drained(*handoff.id, handoff.reason, handoff.cause)
        return [Order(ReleaseBlocks(*handoff.id)), Tell(drained)]

    def _forget(self, handoff: _Handoff, outcome: Literal["committed", "drained"]) -> None:
        del self._open[handoff.id]
        self._ended[handoff.id] = outcome


def _open(event: ReservationMade, mapping: KvMapping, now: float) -> _Handoff:
    """Its units: the pieces that hold the prompt, without those that are our own prefix hit."""
    per_block = mapping.target_pieces_per_block
    num_pieces = max(0, mapping.num_pieces(event.num_prompt_tokens) - event.first_block * per_block)
    piece_ids = pieces_of(event.block_ids, per_block)[:num_pieces]
    assert len(piece_ids) == num_pieces, f"{event.num_prompt_tokens} tokens do not fit into {event.block_ids}"
    units = UnitSet(len(mapping.routes), mapping.num_layers, num_pieces)
    return _Handoff(event, mapping, piece_ids, units, lease_until=now + event.lease_s, last_unit_at=now)


def _note_checksums(handoff: _Handoff, event: UnitsWritten) -> None:
    units = event.units
    keys = ((units.route, layer, piece) for layer in units.layers() for piece in units.pieces())
    handoff.checksums.update(zip(keys, event.checksums, strict=False))  # none from a sender that makes none
