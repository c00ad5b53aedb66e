"""Both ends of one worker's handoffs: which of them an event is for (sans-IO)."""

from __future__ import annotations

from collections.abc import Sequence

from dynrt.transfer.decode_end import DecodeEnd
from dynrt.transfer.effects import DecodeEffect, PrefillEffect
from dynrt.transfer.events import (
    Arm,
    CancelHandoff,
    ConnectPeer,
    FencePeer,
    FirstToken,
    PeerQuiesced,
    RenewLease,
    Retarget,
)
from dynrt.transfer.layout import Mismatch
from dynrt.transfer.local import PrefillOpened, ReservationMade
from dynrt.transfer.mapping import KvMapping
from dynrt.transfer.prefill_end import PrefillEnd

Effects = Sequence[PrefillEffect] | Sequence[DecodeEffect]
EndEvent = (
    PrefillOpened
    | ReservationMade
    | Arm
    | Retarget
    | FirstToken
    | RenewLease
    | PeerQuiesced
    | CancelHandoff
    | FencePeer
)


class HandoffEnds:
    """A worker can be the prefill end of some handoffs and the decode end of others."""

    def __init__(self, prefill: PrefillEnd, decode: DecodeEnd) -> None:
        self.prefill = prefill
        self.decode = decode

    @property
    def num_open(self) -> int:
        return self.prefill.num_open + self.decode.num_open

    def introduce(self, peer: ConnectPeer) -> KvMapping | Mismatch:
        """How KV maps between this worker and `peer`; nothing is handed off to or from a stranger."""
        end = self.prefill if peer.will_push else self.decode
        return end.introduce(peer.incarnation, peer.geometry)

    def on_event(self, event: EndEvent, now: float) -> Effects:
        """Pass it on to the end that it is for."""
        match event:
            case PrefillOpened():
                return self.prefill.opened(event)
            case ReservationMade():
                return self.decode.reserved(event, now)
            case Arm():
                return self.prefill.arm(event)
            case Retarget():
                return self.prefill.retarget(event)
            case FirstToken():
                return self.decode.first_token(event)
            case PeerQuiesced():
                return self.decode.peer_quiesced(event, now)
            case CancelHandoff():
                return self._cancel(event)
            case RenewLease():
                self.decode.renew(event, now)
                return []
            case FencePeer(incarnation):
                self.decode.fence(incarnation, now)
                return self.prefill.fence(incarnation)

    def _cancel(self, event: CancelHandoff) -> Effects:
        """Only the end that knows the handoff answers; if none does yet, both: the runtime heeds the one it asked."""
        is_known = self.prefill.knows(event.id) or self.decode.knows(event.id)
        effects: list[PrefillEffect] = []
        if self.prefill.knows(event.id) or not is_known:
            effects += self.prefill.cancel(event)
        if self.decode.knows(event.id) or not is_known:
            effects += self.decode.cancel(event)
        return effects
