"""The compute thread: reservations in order, drops that cross a commit, numbered cache events, failures told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from thread_fakes import (
    DEADLINE_S,
    GEOMETRY,
    KEY,
    FakeEngine,
    FakeTransfer,
    Heard,
    engine_request,
    step_output,
    until,
)

from dynrt.engines import orders
from dynrt.engines.compute import ComputeThread
from dynrt.engines.heartbeat import StepClock
from dynrt.engines.orders import Drop, Generate, Order, Reserve, SnapshotWanted, StatusSeen, StepDone
from dynrt.engines.protocol import Token
from dynrt.planner.events import BlocksRemoved, CacheSnapshot
from dynrt.runtime.messages import StatusRequest
from dynrt.transfer.events import ReserveRefused
from dynrt.transfer.local import CommitBlocks, PrefillOpened, ReleaseBlocks, ReservationMade

BLOCK = GEOMETRY.block_size
A, B, C = (bytes([letter]) * 16 for letter in b"abc")


class Rig:
    """A compute thread among fakes."""

    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.transfer = FakeTransfer()
        self.news = Heard()
        self.failures = Heard()
        self.thread = ComputeThread(self.engine, self.transfer, StepClock(), self.news, self.failures)

    def order(self, *orders: Order) -> None:
        for order in orders:
            self.thread.post(order)

    def pending(self) -> int:
        """Reservations that wait, once all that was ordered before is done."""
        self.order(StatusRequest(1))
        return self.news.next(StatusSeen).pending_reservations


def reserve(num_blocks: int, key: bytes) -> Reserve:
    return Reserve(engine_request(num_blocks * BLOCK, key), "peer", 30.0)


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    rig.thread.start()
    yield rig
    rig.thread.stop(DEADLINE_S)
    assert not rig.thread._thread.is_alive()


def test_the_oldest_reservation_is_not_overtaken(rig: Rig) -> None:
    rig.order(reserve(6, A), reserve(4, B), reserve(1, C))
    assert rig.transfer.next(ReservationMade).key == A
    assert rig.pending() == 2, "there is room for c, but b came before it"
    rig.order(ReleaseBlocks(A, 0))
    assert [rig.transfer.next(ReservationMade).key for _ in range(2)] == [B, C]


def test_a_reservation_that_never_fits_is_refused_and_holds_up_nobody(rig: Rig) -> None:
    rig.order(reserve(GEOMETRY.num_blocks + 1, A), reserve(1, B))
    refused = rig.news.next(ReserveRefused)
    assert (refused.key, refused.reason) == (A, "9 blocks are more than there are")
    assert refused.is_unfit
    assert rig.transfer.next(ReservationMade).key == B


def test_waiting_reservations_are_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "PENDING_RESERVATIONS_LIMIT", 1)
    rig.order(reserve(8, A))
    rig.transfer.next(ReservationMade)
    rig.order(reserve(8, B), reserve(8, C))
    assert rig.news.next(ReserveRefused).key == C
    assert rig.pending() == 1


def test_a_waiting_reservation_that_is_dropped_is_never_made(rig: Rig) -> None:
    rig.order(reserve(8, A))
    rig.transfer.next(ReservationMade)
    rig.order(reserve(1, B), Drop(B, 0), ReleaseBlocks(A, 0), reserve(1, C))
    assert rig.transfer.next(ReservationMade).key == C


def test_a_drop_that_crosses_the_commit_releases(rig: Rig) -> None:
    rig.order(reserve(2, A), Drop(A, 0), CommitBlocks(A, 0, 7))
    until(lambda: ("release", A, 0) in rig.engine.calls)
    rig.order(reserve(2, B), CommitBlocks(B, 0, 7))
    until(lambda: ("commit", B, 0, 7) in rig.engine.calls)
    assert ("commit", A, 0, 7) not in rig.engine.calls
    assert list(rig.engine.held) == [(B, 0)]


def test_what_is_remembered_of_drops_is_bounded(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "TOMBSTONES_LIMIT", 2)
    rig.order(*(Drop(KEY, epoch) for epoch in range(3)), CommitBlocks(KEY, 0, 7), CommitBlocks(KEY, 2, 7))
    until(lambda: ("release", KEY, 2) in rig.engine.calls)
    assert ("commit", KEY, 0, 7) in rig.engine.calls, "the oldest drop is forgotten"


def test_transfer_hears_of_a_prefill_before_the_engine(rig: Rig) -> None:
    calls_when_opened: list[int] = []
    rig.transfer.post = lambda event: calls_when_opened.append(len(rig.engine.calls))
    rig.order(Generate(engine_request(4, A, prefill_only=True)))
    until(lambda: bool(rig.engine.calls))
    assert calls_when_opened == [0]
    rig.order(Generate(engine_request(4, B)))
    until(lambda: len(rig.engine.calls) == 2)
    assert calls_when_opened == [0], "a request that stays here is no handoff"


def test_opened_handoffs_are_posted(rig: Rig) -> None:
    rig.order(Generate(engine_request(4, A, prefill_only=True)))
    assert rig.transfer.next(PrefillOpened) == PrefillOpened(A, 0)


def test_cache_events_are_numbered_without_gaps(rig: Rig) -> None:
    event = BlocksRemoved([1])
    token = Token(A, 1, token_id=5)
    rig.engine.steps = [step_output(events=[event, event]), step_output([token]), step_output(events=[event])]
    rig.order(SnapshotWanted())
    seqs = [done.cache and done.cache.first_seq for done in (rig.news.next(StepDone) for _ in range(3))]
    assert seqs == [0, None, 2]
    rig.order(SnapshotWanted())
    assert rig.news.next(CacheSnapshot).next_seq == 3


def test_a_snapshot_comes_behind_the_events_it_contains(rig: Rig) -> None:
    rig.engine.steps = [step_output(events=[BlocksRemoved([1])])]
    rig.order(SnapshotWanted())
    assert rig.news.next(StepDone).cache is not None
    assert rig.news.next(CacheSnapshot).next_seq == 1


def test_a_step_that_brought_nothing_is_not_told(rig: Rig) -> None:
    token = Token(A, 1, token_id=5)
    rig.engine.steps = [step_output(), step_output(), step_output([token])]
    rig.order(SnapshotWanted())
    assert rig.news.next(StepDone).output.tokens == [token]


def test_a_changed_load_is_told_without_a_step(rig: Rig) -> None:
    rig.order(reserve(3, A))
    assert rig.news.next(StepDone).output.load.blocks_active == 3


def test_a_failing_engine_ends_the_process(rig: Rig) -> None:
    rig.engine.steps = [ZeroDivisionError("in a kernel")]
    rig.order(SnapshotWanted())
    assert str(rig.failures.next(ZeroDivisionError)) == "in a kernel"
