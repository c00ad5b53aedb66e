"""The runtime's side of all handoffs: it owns intent (start, target, cancel, fence), relays, and keeps the deadlines.

Sans-IO: messages and the time go in, effects come out. Who frees what is the ends' own business. The table of states
and events is docs/handoff.md.
"""

from __future__ import annotations

import msgspec

from dynrt.transfer.events import (
    Arm,
    CancelHandoff,
    Cause,
    Committed,
    Drained,
    FencePeer,
    FirstToken,
    FromDecodeEnd,
    FromPrefillEnd,
    HandoffId,
    LeaseExpired,
    PeerConnected,
    PeerQuiesced,
    Quiesced,
    RenewLease,
    Reserved,
    ReserveRefused,
    Retarget,
    Sent,
    Stalled,
)
from dynrt.transfer.ledger_effects import Closed, Decided, Kill, LedgerEffect, Send
from dynrt.transfer.ledger_handoff import EndState, LedgerHandoff, Phase, peers_to_fence


class LedgerLimits(msgspec.Struct, frozen=True):
    """How long the runtime waits for what, and how much it keeps."""

    reserve_answer_s: float = 30.0  # Reserved or ReserveRefused after `open`, while the prompt computes
    room_s: float = 1.0  # Reserved, once the prompt is computed, if another decode worker can be asked
    last_room_s: float = 5.0  # the same if there is none
    push_s: float = 120.0  # Sent, once the prompt is computed
    settle_s: float = 5.0  # an end's last message, once nothing but itself keeps it from sending that
    lease_s: float = 30.0  # of a reservation; and of a finished prompt that waits for another target
    max_open: int = 16384


class HandoffLedger:
    """Every handoff the runtime has open. A handoff opens with `open` and is forgotten with Closed.

    The caller sends the Submits (purposes "prefill" and "reserve"), and tells `worker_lost` only of processes that
    are really dead: what follows lets the other end free memory that a living peer could still write to.
    """

    def __init__(self, limits: LedgerLimits) -> None:
        self._limits = limits
        self._open: dict[HandoffId, LedgerHandoff] = {}
        self._condemned: set[tuple[str, ...]] = set()  # suspects of whom one was asked to be killed
        self._renew_at: float | None = None

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def quarantined_blocks(self) -> int:
        """Reserved blocks of handoffs that came to nothing, which their decode worker has not freed yet."""
        cancelled = [h for h in self._open.values() if h.phase in (Phase.HELD, Phase.CANCELLING)]
        return sum(h.num_reserved for h in cancelled if h.decode_end is EndState.OPEN)

    def oldest_s(self, now: float) -> float:
        """Age of the handoff that has been open for longest; 0 without any."""
        oldest = next(iter(self._open.values()), None)
        return 0.0 if oldest is None else now - oldest.opened_at

    # --- intent -----------------------------------------------------------------------------------

    def open(self, handoff_id: HandoffId, prefill: str, decode: str, now: float) -> None:
        """A request's prefill and reservation are being submitted to these two incarnations."""
        assert prefill != decode, "a worker hands nothing to itself"
        assert handoff_id not in self._open, "an epoch is used once"
        assert len(self._open) < self._limits.max_open, "admission must keep the open handoffs below max_open"
        deadline = now + self._limits.reserve_answer_s
        self._open[handoff_id] = LedgerHandoff(handoff_id, prefill, decode, deadline, now)
        if self._renew_at is None:
            self._renew_at = now + self._limits.lease_s / 3

    def computed(self, handoff_id: HandoffId, has_choice: bool, now: float) -> list[LedgerEffect]:
        """Prefill's last step is over: what is still to be sent can only be slow. `has_choice`: of decode workers."""
        handoff = self._open.get(handoff_id)
        if handoff is not None:
            self._computed(handoff, has_choice, now)
        return []

    def _computed(self, handoff: LedgerHandoff, has_choice: bool, now: float) -> None:
        handoff.is_computed = True
        if handoff.phase is Phase.RESERVING:
            limits = self._limits
            handoff.deadline = now + (limits.room_s if has_choice else limits.last_room_s)
        self._expect_commit(handoff, now)

    def retarget(
        self, handoff_id: HandoffId, new_id: HandoffId, prefill: str, decode: str, now: float
    ) -> list[LedgerEffect]:
        """After "no_room": `decode` is being asked to reserve for the prompt that `prefill` holds, as `new_id`."""
        self.open(new_id, prefill, decode, now)
        new, held = self._open[new_id], self._open.get(handoff_id)
        if held is None or held.phase is not Phase.HELD:
            new.prefill_end = EndState.ENDED
            failed = self._cancel(new, "overdue", "the finished prompt was let go", now)
            return [*failed, *self._relay_quiesced(new, True, now)]
        self._computed(new, True, now)
        held.prefill_end = EndState.ENDED  # what it still holds is the new handoff's
        held.phase, held.deadline = Phase.CANCELLING, now + self._limits.settle_s
        return [Send(prefill, Retarget(*handoff_id, new_id[1])), *self._close_if_over(held)]

    def first_token(self, token: FirstToken) -> list[LedgerEffect]:
        """The client was sent its first token, and decode goes on behind it."""
        handoff = self._open.get(token.id)
        return [Send(handoff.decode, token)] if handoff is not None and handoff.wants_decode else []

    def cancel(self, handoff_id: HandoffId, reason: str, now: float) -> list[LedgerEffect]:
        """The request does not want this handoff any more. After Committed: nothing, cancel the request itself."""
        handoff = self._open.get(handoff_id)
        if handoff is None or handoff.phase in (Phase.CANCELLING, Phase.COMMITTED):
            return []
        return self._cancel(handoff, "cancelled", reason, now)

    def worker_lost(self, incarnation: str, now: float) -> list[LedgerEffect]:
        """That process is dead. The caller may tell FencePeer to every other worker as well: it is idempotent."""
        self._condemned = {suspects for suspects in self._condemned if incarnation not in suspects}
        affected = [h for h in self._open.values() if incarnation in (h.prefill, h.decode)]
        effects: list[LedgerEffect] = []
        effects += [Send(peer, FencePeer(incarnation)) for peer in peers_to_fence(affected, incarnation)]
        for handoff in affected:
            effects += self._end_lost(handoff, incarnation, now)
        return effects

    def _end_lost(self, handoff: LedgerHandoff, incarnation: str, now: float) -> list[LedgerEffect]:
        role = "prefill" if incarnation == handoff.prefill else "decode"
        if role == "prefill":
            handoff.prefill_end = EndState.LOST
        else:
            handoff.decode_end = EndState.LOST
        if handoff.phase is Phase.COMMITTED or (role == "prefill" and handoff.is_all_sent):
            return self._close_if_over(handoff)  # decode needs nothing more from the prefill worker
        if handoff.phase is Phase.HELD and role == "decode":
            return []  # it is not asked any more
        return self._cancel(handoff, "fenced", f"{role} worker {incarnation} is dead", now)

    # --- what the ends say ------------------------------------------------------------------------

    def on_message(
        self, sender: str, message: FromPrefillEnd | FromDecodeEnd, now: float
    ) -> list[LedgerEffect]:
        """A handoff message of `sender`. Unknown handoffs are over: what comes late for them means nothing.

        Not so a lease that expired: blocks are held there for an earlier runtime.
        """
        if isinstance(message, PeerConnected):
            return []
        handoff = self._open.get(message.id)
        if handoff is None:
            return self._inherit(sender, message, now) if isinstance(message, LeaseExpired) else []
        # Asked to cancel what it did not know yet, a worker answers for both ends: heed the one that it is.
        if isinstance(message, Sent | Quiesced | Stalled):
            return self._from_prefill(handoff, message, now) if sender == handoff.prefill else []
        return self._from_decode(handoff, message, now) if sender == handoff.decode else []

    def _inherit(self, decode: str, message: LeaseExpired, now: float) -> list[LedgerEffect]:
        """Cancel it in good order: only the prefill end's word lets decode free its blocks."""
        if len(self._open) >= self._limits.max_open:
            return []  # said again after another lease
        handoff = LedgerHandoff(
            message.id, message.peer, decode, None, now, is_decided=True, is_inherited=True
        )
        self._open[message.id] = handoff
        return self._cancel(handoff, "lease", "its runtime is gone", now)

    def _from_prefill(
        self, handoff: LedgerHandoff, message: Sent | Quiesced | Stalled, now: float
    ) -> list[LedgerEffect]:
        if isinstance(message, Stalled):
            return self._stalled(handoff, now)
        if handoff.prefill_end is EndState.OPEN:
            handoff.prefill_end = EndState.ENDED
        if isinstance(message, Quiesced):
            return self._quiesced(handoff, message, now)
        handoff.kv_bytes = message.kv_bytes
        self._expect_commit(handoff, now)
        return self._close_if_over(handoff)

    def _stalled(self, handoff: LedgerHandoff, now: float) -> list[LedgerEffect]:
        if handoff.phase in (Phase.CANCELLING, Phase.COMMITTED):
            return []
        return self._cancel(handoff, "transport", "its writes do not end", now)

    def _quiesced(self, handoff: LedgerHandoff, message: Quiesced, now: float) -> list[LedgerEffect]:
        stopped: list[LedgerEffect] = []
        if handoff.phase in (Phase.RESERVING, Phase.PUSHING, Phase.HELD):
            cause = message.cause if message.cause != "cancelled" else "refused"
            stopped = self._cancel(handoff, cause, message.reason, now)
        return [*stopped, *self._relay_quiesced(handoff, message.clean, now), *self._close_if_over(handoff)]

    def _relay_quiesced(self, handoff: LedgerHandoff, clean: bool, now: float) -> list[LedgerEffect]:
        if handoff.decode_end is not EndState.OPEN:
            return []
        handoff.deadline = now + self._limits.settle_s
        return [Send(handoff.decode, PeerQuiesced(*handoff.id, clean))]

    def _from_decode(self, handoff: LedgerHandoff, message: FromDecodeEnd, now: float) -> list[LedgerEffect]:
        match message:
            case Reserved():
                return self._reserved(handoff, message, now)
            case Committed():
                return self._committed(handoff, message, now)
            case ReserveRefused(reason=reason, is_unfit=is_unfit):
                return self._decode_gave_up(handoff, "unfit" if is_unfit else "refused", reason, now)
            case Drained(reason=reason, cause=cause):
                return self._decode_gave_up(handoff, cause, reason, now)
            case LeaseExpired():
                return self._lease_expired(handoff, now)

    def _reserved(self, handoff: LedgerHandoff, message: Reserved, now: float) -> list[LedgerEffect]:
        handoff.num_reserved = len(message.block_ids)
        if handoff.phase is not Phase.RESERVING:
            return []
        handoff.phase, handoff.deadline = Phase.PUSHING, None
        self._expect_commit(handoff, now)
        return [Send(handoff.prefill, _arm(handoff, message))]

    def _committed(self, handoff: LedgerHandoff, message: Committed, now: float) -> list[LedgerEffect]:
        handoff.decode_end = EndState.ENDED
        if handoff.phase is Phase.HELD:  # it crossed our word, which ends the request there
            return []
        if handoff.phase is not Phase.CANCELLING:
            handoff.phase, handoff.deadline = Phase.COMMITTED, now + self._limits.settle_s
        decided = Decided(handoff.id, "committed", "", message.received_at, message.host)
        return handoff.decided(decided) + self._close_if_over(handoff)

    def _decode_gave_up(
        self, handoff: LedgerHandoff, cause: Cause, reason: str, now: float
    ) -> list[LedgerEffect]:
        handoff.decode_end = EndState.ENDED
        if handoff.phase in (Phase.HELD, Phase.CANCELLING):
            return self._close_if_over(handoff)
        if handoff.prefill_end is EndState.LOST:
            cause = "fenced"
        return self._cancel(handoff, cause, reason, now)

    def _lease_expired(self, handoff: LedgerHandoff, now: float) -> list[LedgerEffect]:
        if handoff.phase in (Phase.HELD, Phase.CANCELLING):
            return []
        return self._cancel(handoff, "lease", "the decode worker's lease expired", now)

    # --- time -------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When `on_time` has something to do, at the latest."""
        deadlines = [h.deadline for h in self._open.values() if h.deadline is not None]
        if self._renew_at is not None:
            deadlines.append(self._renew_at)
        return min(deadlines, default=None)

    def on_time(self, now: float) -> list[LedgerEffect]:
        """Renew leases, and act on every deadline that has passed."""
        effects = self._renew(now)
        for handoff in list(self._open.values()):
            if handoff.deadline is not None and now >= handoff.deadline:
                effects += self._overdue(handoff, now)
        return effects

    def _renew(self, now: float) -> list[LedgerEffect]:
        if self._renew_at is None or now < self._renew_at:
            return []
        self._renew_at = now + self._limits.lease_s / 3 if self._open else None
        by_decode: dict[str, list[HandoffId]] = {}
        for handoff in self._open.values():
            if handoff.wants_decode:
                by_decode.setdefault(handoff.decode, []).append(handoff.id)
        return [Send(decode, RenewLease(ids, self._limits.lease_s)) for decode, ids in by_decode.items()]

    def _overdue(self, handoff: LedgerHandoff, now: float) -> list[LedgerEffect]:
        if handoff.is_inherited:  # its prefill worker may not have joined this runtime yet: no reason to kill
            del self._open[handoff.id]
            return []
        match handoff.phase:
            case Phase.RESERVING if handoff.is_computed:
                return self._hold(handoff, now)
            case Phase.HELD:
                return self._cancel(handoff, "overdue", "nobody took the finished prompt", now)
            case Phase.RESERVING:
                reason = f"no answer to the reservation in {self._limits.reserve_answer_s:g} s"
                return self._cancel(handoff, "overdue", reason, now)
            case Phase.PUSHING:
                return self._cancel(handoff, "overdue", self._too_slow(handoff), now)
            case Phase.CANCELLING | Phase.COMMITTED:
                handoff.deadline = now + self._limits.settle_s
                return self._kill(handoff)

    def _hold(self, handoff: LedgerHandoff, now: float) -> list[LedgerEffect]:
        """Decode forgets it, now: with no target known, nothing can have been written there."""
        handoff.phase, handoff.deadline = Phase.HELD, now + self._limits.lease_s
        reason = "decode had no room for the finished prompt"
        return [
            *handoff.decide("no_room", reason),
            Send(handoff.decode, CancelHandoff(*handoff.id, reason)),
            Send(handoff.decode, PeerQuiesced(*handoff.id)),
        ]

    def _too_slow(self, handoff: LedgerHandoff) -> str:
        if handoff.kv_bytes is None:
            return f"not all was sent {self._limits.push_s:g} s after the prompt was computed"
        return f"all was sent, but not committed in {self._limits.settle_s:g} s"

    def _kill(self, handoff: LedgerHandoff) -> list[LedgerEffect]:
        """Whoever keeps this handoff open hangs. Decode waits for the prefill end, so that one first."""
        ends = ((handoff.prefill_end, handoff.prefill), (handoff.decode_end, handoff.decode))
        suspects = tuple(worker for end, worker in ends if end is EndState.OPEN)
        if handoff.decode_end is EndState.ENDED:
            suspects = (
                handoff.prefill,
                handoff.decode,
            )  # it spoke its last word; its transport may hang still
        if suspects in self._condemned:
            return []
        self._condemned.add(suspects)
        return [Kill(suspects, f"did not end handoff {handoff.id[0].hex()} in {self._limits.settle_s:g} s")]

    # --- transitions ------------------------------------------------------------------------------

    def _expect_commit(self, handoff: LedgerHandoff, now: float) -> None:
        if handoff.phase is Phase.PUSHING and handoff.is_computed:
            is_sent = handoff.kv_bytes is not None
            handoff.deadline = now + (self._limits.settle_s if is_sent else self._limits.push_s)

    def _cancel(self, handoff: LedgerHandoff, cause: Cause, reason: str, now: float) -> list[LedgerEffect]:
        effects = handoff.decide(cause, reason)
        was_sent = handoff.phase is not Phase.CANCELLING and handoff.kv_bytes is not None
        handoff.phase, handoff.deadline = Phase.CANCELLING, now + self._limits.settle_s
        ends = ((handoff.prefill_end, handoff.prefill), (handoff.decode_end, handoff.decode))
        effects += [Send(to, CancelHandoff(*handoff.id, reason)) for end, to in ends if end is EndState.OPEN]
        if was_sent:  # that word was spoken before: decode may free
            effects += self._relay_quiesced(handoff, True, now)
        return effects + self._close_if_over(handoff)

    def _close_if_over(self, handoff: LedgerHandoff) -> list[LedgerEffect]:
        if EndState.OPEN in (handoff.prefill_end, handoff.decode_end):
            return []
        if self._open.pop(handoff.id, None) is None:
            return []
        return [Closed(handoff.id, handoff.kv_bytes)]


def _arm(handoff: LedgerHandoff, target: Reserved) -> Arm:
    return Arm(*handoff.id, handoff.decode, target.first_block, target.block_ids, target.num_tokens)
