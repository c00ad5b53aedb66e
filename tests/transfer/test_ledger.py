"""The runtime's ledger alone: what it relays, what it decides, and what it does when an answer does not come."""

from __future__ import annotations

import pytest

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
    LeaseExpired,
    PeerQuiesced,
    Quiesced,
    RenewLease,
    Reserved,
    ReserveRefused,
    Sent,
    Stalled,
)
from dynrt.transfer.ledger import HandoffLedger, LedgerLimits
from dynrt.transfer.ledger_effects import Closed, Decided, Kill, LedgerEffect, Outcome, Send

KEY = b"k" * 16
ID = (KEY, 1)
LIMITS = LedgerLimits(reserve_answer_s=30.0, settle_s=5.0, lease_s=30.0, max_open=2)

RESERVED = Reserved(*ID, 2, [5, 6], 60)
ARM = Send("p", Arm(*ID, "d", 2, [5, 6], 60))
TOKEN = FirstToken(*ID, 42, 3)
SENT = Sent(*ID, kv_bytes=800, num_writes=4, post_s=0.1, link_s=0.2)
COMMITTED = Committed(*ID, received_at=3.5, host="here")


def opened() -> HandoffLedger:
    ledger = HandoffLedger(LIMITS)
    ledger.open(ID, prefill="p", decode="d", now=0.0)
    return ledger


def pushing() -> HandoffLedger:
    ledger = opened()
    assert ledger.on_message("d", RESERVED, 1.0) == [ARM]
    return ledger


def hear(ledger: HandoffLedger, *messages: FromPrefillEnd | FromDecodeEnd) -> list[LedgerEffect]:
    """Each from the worker that says such things."""
    effects: list[LedgerEffect] = []
    for message in messages:
        sender = "p" if isinstance(message, Sent | Quiesced | Stalled) else "d"
        effects += ledger.on_message(sender, message, 2.0)
    return effects


def stop(to: str, reason: str) -> Send:
    return Send(to, CancelHandoff(*ID, reason))


def lost(cause: Cause, reason: str) -> Decided:
    outcome: Outcome = cause if cause == "cancelled" or cause == "fenced" else "failed"
    return Decided(ID, outcome, reason, cause=cause)


def test_the_ordinary_way() -> None:
    ledger = pushing()
    assert ledger.first_token(TOKEN) == [Send("d", TOKEN)]
    assert hear(ledger, SENT) == []
    assert hear(ledger, COMMITTED) == [Decided(ID, "committed", "", 3.5, "here"), Closed(ID, 800)]
    assert ledger.num_open == 0


def test_it_is_closed_only_when_the_prefill_end_is_through_as_well() -> None:
    ledger = pushing()
    ledger.computed(ID, has_choice=True, now=2.0)
    assert hear(ledger, COMMITTED) == [Decided(ID, "committed", "", 3.5, "here")]
    assert hear(ledger, SENT) == [Closed(ID, 800)]


def test_a_cancel_stops_both_ends_and_relays_the_word_of_one_to_the_other() -> None:
    ledger = pushing()
    cancelled = ledger.cancel(ID, "gone", 2.0)
    assert cancelled == [lost("cancelled", "gone"), stop("p", "gone"), stop("d", "gone")]
    assert ledger.cancel(ID, "again", 2.0) == [] and ledger.first_token(TOKEN) == []
    assert hear(ledger, Quiesced(*ID, "gone", clean=False)) == [Send("d", PeerQuiesced(*ID, clean=False))]
    assert hear(ledger, Drained(*ID, "gone")) == [Closed(ID, None)]


def test_a_cancel_after_all_was_sent_tells_decode_that_the_prefill_end_is_quiet() -> None:
    ledger = pushing()
    hear(ledger, SENT)
    cancelled = ledger.cancel(ID, "gone", 2.0)
    assert cancelled == [lost("cancelled", "gone"), stop("d", "gone"), Send("d", PeerQuiesced(*ID))]


def test_a_cancel_that_crosses_the_commit_stays_cancelled() -> None:
    ledger = pushing()
    ledger.cancel(ID, "gone", 2.0)
    assert hear(ledger, COMMITTED, Quiesced(*ID, "gone")) == [Closed(ID, None)]


def test_a_cancel_after_the_commit_is_the_requests_own_affair() -> None:
    ledger = pushing()
    hear(ledger, COMMITTED)
    assert ledger.cancel(ID, "gone", 2.0) == []


def test_a_reservation_that_comes_after_the_cancel_is_not_armed() -> None:
    ledger = opened()
    ledger.cancel(ID, "gone", 1.0)
    assert hear(ledger, RESERVED) == []


@pytest.mark.parametrize("answer", [ReserveRefused(*ID, "full"), Drained(*ID, "full", "refused")])
def test_decode_giving_up_fails_the_handoff(answer: FromDecodeEnd) -> None:
    ledger = pushing()
    assert hear(ledger, answer) == [lost("refused", "full"), stop("p", "full")]
    assert hear(ledger, Quiesced(*ID, "full")) == [Closed(ID, None)]


def test_prompt_that_can_never_run_on_decode_is_told_apart() -> None:
    answer = ReserveRefused(*ID, "too long", is_unfit=True)
    assert hear(pushing(), answer) == [lost("unfit", "too long"), stop("p", "too long")]


def test_the_prefill_end_giving_up_fails_the_handoff() -> None:
    ledger = pushing()
    effects = hear(ledger, Quiesced(*ID, "reset", clean=False, cause="transport"))
    relayed = Send("d", PeerQuiesced(*ID, clean=False))
    assert effects == [lost("transport", "reset"), stop("d", "reset"), relayed]
    assert hear(ledger, Drained(*ID, "reset")) == [Closed(ID, None)]


def test_an_expired_lease_cancels_both_ends() -> None:
    ledger = pushing()
    reason = "the decode worker's lease expired"
    assert hear(ledger, LeaseExpired(*ID, "p")) == [
        lost("lease", reason),
        stop("p", reason),
        stop("d", reason),
    ]
    assert hear(ledger, LeaseExpired(*ID, "p")) == []


def test_a_dead_prefill_worker_is_fenced_at_decode() -> None:
    ledger = pushing()
    reason = "prefill worker p is dead"
    effects = ledger.worker_lost("p", 2.0)
    assert effects == [Send("d", FencePeer("p")), lost("fenced", reason), stop("d", reason)]
    assert hear(ledger, Drained(*ID, reason)) == [Closed(ID, None)]


def test_a_prefill_worker_that_dies_after_its_work_costs_nothing() -> None:
    ledger = pushing()
    ledger.computed(ID, has_choice=True, now=2.0)
    hear(ledger, SENT)
    assert ledger.worker_lost("p", 2.0) == [Send("d", FencePeer("p"))]
    assert hear(ledger, COMMITTED) == [Decided(ID, "committed", "", 3.5, "here"), Closed(ID, 800)]


def test_a_prefill_worker_that_dies_with_the_first_token_loses_the_handoff() -> None:
    ledger = pushing()
    hear(ledger, SENT)
    fence, decided, *_ = ledger.worker_lost("p", 2.0)
    assert fence == Send("d", FencePeer("p"))
    assert decided == lost("fenced", "prefill worker p is dead")


def test_a_dead_decode_worker_is_fenced_at_prefill() -> None:
    ledger = pushing()
    reason = "decode worker d is dead"
    effects = ledger.worker_lost("d", 2.0)
    assert effects == [Send("p", FencePeer("d")), lost("fenced", reason), stop("p", reason)]
    assert hear(ledger, Quiesced(*ID, reason)) == [Closed(ID, None)]


def test_two_dead_workers_leave_nothing_open() -> None:
    ledger = pushing()
    ledger.worker_lost("d", 2.0)
    assert ledger.worker_lost("p", 2.0) == [Closed(ID, None)]
    assert ledger.worker_lost("p", 2.0) == []


def test_each_peer_is_fenced_once_however_many_handoffs_it_has() -> None:
    ledger = pushing()
    ledger.open((KEY, 2), prefill="p", decode="d", now=1.0)
    fences = [
        e for e in ledger.worker_lost("p", 2.0) if isinstance(e, Send) and isinstance(e.message, FencePeer)
    ]
    assert fences == [Send("d", FencePeer("p"))]


def test_an_unanswered_reservation_is_cancelled_and_then_the_prefill_worker_is_killed_first() -> None:
    ledger = opened()
    assert all(is_renewal(effect) for effect in ledger.on_time(29.0))
    decided, *sends = [e for e in ledger.on_time(30.0) if not is_renewal(e)]
    assert isinstance(decided, Decided) and decided.outcome == "failed" and len(sends) == 2
    (kill,) = [e for e in ledger.on_time(35.0) if not is_renewal(e)]
    assert isinstance(kill, Kill) and kill.suspects[0] == "p"
    assert [e for e in ledger.on_time(40.0) if not is_renewal(e)] == []  # asked for already
    ledger.worker_lost("p", 41.0)
    (kill,) = [e for e in ledger.on_time(46.0) if not is_renewal(e)]
    assert isinstance(kill, Kill) and kill.suspects == ("d",)


def is_renewal(effect: LedgerEffect) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, RenewLease)


def test_a_decode_end_that_was_sent_everything_must_commit_in_time() -> None:
    ledger = pushing()
    ledger.computed(ID, has_choice=True, now=2.0)
    hear(ledger, SENT)
    assert ledger.next_deadline() == 2.0 + LIMITS.settle_s
    decided, *sends = ledger.on_time(7.0)
    assert isinstance(decided, Decided) and decided.outcome == "failed"
    assert sends == [stop("d", decided.reason), Send("d", PeerQuiesced(*ID))]


def test_a_prefill_end_that_does_not_report_after_the_commit_is_killed() -> None:
    ledger = pushing()
    hear(ledger, COMMITTED)
    (kill,) = ledger.on_time(7.0)
    assert isinstance(kill, Kill) and kill.suspects[0] == "p"


def test_a_prompt_may_compute_for_as_long_as_it_takes_and_its_lease_is_renewed() -> None:
    ledger = pushing()
    for now in range(10, 3600, 10):
        assert ledger.next_deadline() == now
        assert ledger.on_time(float(now)) == [Send("d", RenewLease([ID], LIMITS.lease_s))]


def test_nothing_is_due_when_nothing_is_open() -> None:
    ledger = pushing()
    hear(ledger, ReserveRefused(*ID, "full"), Quiesced(*ID, "full"))
    ledger.on_time(10.0)
    assert ledger.next_deadline() is None


def test_a_worker_that_answers_for_both_ends_is_heard_as_the_one_it_is() -> None:
    ledger = opened()
    ledger.cancel(ID, "gone", 1.0)
    assert ledger.on_message("p", Drained(*ID, "gone"), 2.0) == []
    assert ledger.on_message("d", Quiesced(*ID, "gone"), 2.0) == []
    assert hear(ledger, Drained(*ID, "gone"), Quiesced(*ID, "gone")) == [Closed(ID, None)]


def test_messages_about_unknown_handoffs_mean_nothing() -> None:
    ledger = HandoffLedger(LIMITS)
    assert hear(ledger, RESERVED, SENT, COMMITTED, Drained(*ID, "x"), Quiesced(*ID, "x")) == []
    assert ledger.first_token(TOKEN) == [] and ledger.cancel(ID, "x", 1.0) == []


def test_more_than_the_bound_is_a_fault_of_admission() -> None:
    ledger = opened()
    ledger.open((KEY, 2), "p", "d", 0.0)
    with pytest.raises(AssertionError, match="max_open"):
        ledger.open((KEY, 3), "p", "d", 0.0)


def test_writes_that_do_not_end_cancel_both_ends_and_then_either_worker_may_be_to_blame() -> None:
    ledger = pushing()
    reason = "its writes do not end"
    assert hear(ledger, Stalled(*ID)) == [lost("transport", reason), stop("p", reason), stop("d", reason)]
    assert hear(ledger, Stalled(*ID)) == []
    (kill,) = ledger.on_time(7.0)
    assert isinstance(kill, Kill) and kill.suspects == ("p", "d")


def test_once_the_prompt_is_computed_sending_it_has_a_limit() -> None:
    ledger = pushing()
    ledger.computed(ID, has_choice=True, now=2.0)
    assert [e for e in ledger.on_time(121.0) if not is_renewal(e)] == []
    overdue = [e for e in ledger.on_time(122.0) if not is_renewal(e)]
    assert overdue[0] == lost("overdue", "not all was sent 120 s after the prompt was computed")


def test_the_oldest_open_handoff_has_an_age() -> None:
    ledger = opened()
    ledger.open((KEY, 2), prefill="p", decode="d", now=3.0)
    assert (ledger.oldest_s(5.0), HandoffLedger(LIMITS).oldest_s(5.0)) == (5.0, 0.0)


def inherited() -> HandoffLedger:
    """Decode holds blocks that a runtime asked for which is gone."""
    ledger = HandoffLedger(LIMITS)
    reason = "its runtime is gone"
    assert hear(ledger, LeaseExpired(*ID, "p")) == [stop("p", reason), stop("d", reason)]
    return ledger


def test_a_handoff_of_an_earlier_runtime_is_cancelled_in_good_order() -> None:
    ledger = inherited()
    assert hear(ledger, LeaseExpired(*ID, "p")) == []
    assert hear(ledger, Quiesced(*ID, "x")) == [Send("d", PeerQuiesced(*ID))]
    assert hear(ledger, Drained(*ID, "x")) == [Closed(ID, None)]


def test_nobody_is_killed_over_a_handoff_of_an_earlier_runtime() -> None:
    ledger = inherited()
    deadline = ledger.next_deadline()
    assert deadline is not None and ledger.on_time(deadline) == []
    assert ledger.num_open == 0
    assert hear(ledger, LeaseExpired(*ID, "p")), "tried again after another lease"
