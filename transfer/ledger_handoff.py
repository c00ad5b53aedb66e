"""One handoff as the runtime's ledger knows it: its phase, and what is left open at its two ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, auto

from dynrt.transfer.events import Cause, HandoffId
from dynrt.transfer.ledger_effects import Decided, LedgerEffect, Outcome


class Phase(Enum):
    RESERVING = auto()  # no target yet
    PUSHING = auto()  # the prefill end knows its target
    HELD = auto()  # decode had no room and has to forget it: the finished prompt waits for another target
    CANCELLING = auto()  # both ends were told to stop
    COMMITTED = auto()  # decode has it; the prefill end's Sent is still to come


class EndState(Enum):
    OPEN = auto()
    ENDED = auto()  # it said its last word
    LOST = auto()  # its process is dead


@dataclass
class LedgerHandoff:
    """What the runtime knows of both ends."""

    id: HandoffId
    prefill: str
    decode: str
    deadline: float | None
    opened_at: float
    phase: Phase = Phase.RESERVING
    prefill_end: EndState = EndState.OPEN
    decode_end: EndState = EndState.OPEN
    num_reserved: int = 0  # blocks on decode
    kv_bytes: int | None = None  # set by Sent
    is_computed: bool = False  # all of the prompt, as far as the runtime knows
    is_decided: bool = False
    is_inherited: bool = False  # from a runtime that is gone; its request went with it

    def decide(self, cause: Cause, reason: str) -> list[LedgerEffect]:
        """It comes to nothing."""
        outcome: Outcome = "failed"
        if cause == "cancelled" or cause == "fenced":
            outcome = cause
        return self.decided(Decided(self.id, outcome, reason, cause=cause))

    def decided(self, decided: Decided) -> list[LedgerEffect]:
        """`decided`, the first time."""
        if self.is_decided:
            return []
        self.is_decided = True
        return [decided]

    @property
    def wants_decode(self) -> bool:
        """Decode holds blocks, or will, and the request still wants them there."""
        return self.decode_end is EndState.OPEN and self.phase not in (Phase.HELD, Phase.CANCELLING)

    @property
    def is_all_sent(self) -> bool:
        """Decode needs nothing more from the prefill worker."""
        return self.kv_bytes is not None and self.is_computed


def peers_to_fence(affected: Iterable[LedgerHandoff], incarnation: str) -> list[str]:
    """The workers with an open end against that incarnation, each once."""
    peers: dict[str, None] = {}
    for handoff in affected:
        if handoff.prefill == incarnation and handoff.decode_end is EndState.OPEN:
            peers[handoff.decode] = None
        if handoff.decode == incarnation and handoff.prefill_end is EndState.OPEN:
            peers[handoff.prefill] = None
    return list(peers)
