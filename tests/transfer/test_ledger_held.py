"""The ledger when decode has no room for a finished prompt: forgotten there, held on prefill, taken elsewhere."""

from __future__ import annotations

import pytest

from dynrt.transfer.events import (
    Arm,
    CancelHandoff,
    Committed,
    Drained,
    FencePeer,
    FirstToken,
    FromDecodeEnd,
    LeaseExpired,
    PeerQuiesced,
    Quiesced,
    RenewLease,
    Reserved,
    ReserveRefused,
    Retarget,
    Stalled,
)
from dynrt.transfer.ledger import HandoffLedger, LedgerLimits
from dynrt.transfer.ledger_effects import Closed, Decided, Kill, Send

KEY = b"k" * 16
OLD, NEW = (KEY, 1), (KEY, 2)
LIMITS = LedgerLimits(room_s=1.0, last_room_s=5.0, lease_s=30.0, settle_s=4.0)
REASON = "decode had no room for the finished prompt"
NO_ROOM = Decided(OLD, "failed", REASON, cause="no_room")
FORGET = [Send("d", CancelHandoff(*OLD, REASON)), Send("d", PeerQuiesced(*OLD))]


def computed(has_choice: bool = True) -> HandoffLedger:
    ledger = HandoffLedger(LIMITS)
    ledger.open(OLD, "p", "d", now=9.0)
    assert ledger.computed(OLD, has_choice, now=10.0) == []
    return ledger


def held() -> HandoffLedger:
    ledger = computed()
    assert ledger.on_time(11.0) == [NO_ROOM, *FORGET]
    return ledger


@pytest.mark.parametrize(("has_choice", "until"), [(True, 11.0), (False, 15.0)])
def test_a_finished_prompt_waits_longer_where_there_is_no_other_worker(
    has_choice: bool, until: float
) -> None:
    ledger = computed(has_choice)
    assert ledger.next_deadline() == until
    assert ledger.on_time(until - 0.1) == []
    assert ledger.on_time(until) == [NO_ROOM, *FORGET]


def test_a_prompt_that_still_computes_lets_its_reservation_wait() -> None:
    ledger = HandoffLedger(LIMITS)
    ledger.open(OLD, "p", "d", now=0.0)
    assert ledger.on_time(29.9) == [Send("d", RenewLease([OLD], 30.0))]


def test_one_with_room_in_time_is_not_held() -> None:
    ledger = computed()
    ledger.on_message("d", Reserved(*OLD, 0, [1], 9), 10.5)
    assert not any(isinstance(effect, Decided) for effect in ledger.on_time(20.0))


def test_it_goes_to_another_worker_under_a_new_epoch() -> None:
    ledger = held()
    assert ledger.retarget(OLD, NEW, "p", "d2", 12.0) == [Send("p", Retarget(*OLD, 2))]
    token = FirstToken(*NEW, 42, 3)
    assert ledger.first_token(token) == [Send("d2", token)]
    assert ledger.on_message("d", Drained(*OLD, REASON), 12.0) == [Closed(OLD, None)]
    assert ledger.on_message("d2", Reserved(*NEW, 0, [4], 9), 12.5) == [Send("p", Arm(*NEW, "d2", 0, [4], 9))]


def test_the_new_one_is_held_in_its_turn() -> None:
    ledger = held()
    ledger.retarget(OLD, NEW, "p", "d2", 12.0)
    assert Decided(NEW, "failed", REASON, cause="no_room") in ledger.on_time(13.0)


@pytest.mark.parametrize(
    "said",
    [Reserved(*OLD, 0, [1], 9), Committed(*OLD, 1.0, "here"), LeaseExpired(*OLD, "p"), Drained(*OLD, "x"),
     ReserveRefused(*OLD, "full")],
)  # fmt: skip
def test_what_the_worker_without_room_says_late_changes_nothing(said: FromDecodeEnd) -> None:
    ledger = held()
    assert ledger.on_message("d", said, 11.5) == []
    assert ledger.retarget(OLD, NEW, "p", "d2", 12.0)[0] == Send("p", Retarget(*OLD, 2))


def test_its_death_changes_nothing_either() -> None:
    ledger = held()
    assert ledger.worker_lost("d", 11.5) == [Send("p", FencePeer("d"))]
    assert ledger.retarget(OLD, NEW, "p", "d2", 12.0) == [Send("p", Retarget(*OLD, 2)), Closed(OLD, None)]


def test_whoever_takes_no_order_to_forget_hangs() -> None:
    ledger = held()
    ledger.retarget(OLD, NEW, "p", "d2", 12.0)
    ledger.on_message("d2", Reserved(*NEW, 0, [4], 9), 12.5)
    (kill,) = [effect for effect in ledger.on_time(16.0) if isinstance(effect, Kill)]
    assert kill.suspects == ("d",)


def test_cancelled_while_it_is_held() -> None:
    ledger = held()
    ledger.on_message("d", Drained(*OLD, REASON), 11.5)
    assert ledger.cancel(OLD, "prefill decodes on", 12.0) == [
        Send("p", CancelHandoff(*OLD, "prefill decodes on"))
    ]
    assert ledger.on_message("p", Quiesced(*OLD, "x"), 12.0) == [Closed(OLD, None)]


def test_prefill_dies_while_it_is_held() -> None:
    ledger = held()
    effects = ledger.worker_lost("p", 11.5)
    assert Send("d", FencePeer("p")) in effects
    assert ledger.on_message("d", Drained(*OLD, REASON), 11.6) == [Closed(OLD, None)]


@pytest.mark.parametrize("said", [Quiesced(*OLD, "reset", cause="transport"), Stalled(*OLD)])
def test_prefill_gives_up_while_it_is_held(said: Quiesced | Stalled) -> None:
    ledger = held()
    ledger.on_message("p", said, 11.5)
    assert is_let_go(ledger)


def test_nobody_takes_it_within_its_lease() -> None:
    ledger = held()
    assert Send("p", CancelHandoff(*OLD, "nobody took the finished prompt")) in ledger.on_time(41.0)
    assert is_let_go(ledger)


def test_it_was_closed_before_anybody_took_it() -> None:
    ledger = held()
    ledger.on_message("d", Drained(*OLD, REASON), 11.5)
    ledger.cancel(OLD, "gone", 11.5)
    ledger.on_message("p", Quiesced(*OLD, "gone"), 11.6)
    assert ledger.num_open == 0 and is_let_go(ledger)


def is_let_go(ledger: HandoffLedger) -> bool:
    """A move comes too late: the new handoff fails at once, and its decode worker may free at once."""
    reason = "the finished prompt was let go"
    effects = ledger.retarget(OLD, NEW, "p", "d2", 12.0)
    closed = ledger.on_message("d2", Drained(*NEW, reason), 12.0)
    return (effects, closed) == (
        [
            Decided(NEW, "failed", reason, cause="overdue"),
            Send("d2", CancelHandoff(*NEW, reason)),
            Send("d2", PeerQuiesced(*NEW)),
        ],
        [Closed(NEW, None)],
    )


def test_blocks_that_were_reserved_too_late_are_in_quarantine() -> None:
    ledger = held()
    ledger.on_message("d", Reserved(*OLD, 0, [1, 2], 9), 11.5)
    assert ledger.quarantined_blocks == 2
    ledger.on_message("d", Drained(*OLD, REASON), 11.6)
    assert ledger.quarantined_blocks == 0
    assert ledger.on_time(22.0) == [], "no lease is renewed for what nobody wants"
