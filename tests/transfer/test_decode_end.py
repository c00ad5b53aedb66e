"""The decode end alone: when reserved blocks become the request's, when they are free, and what late news does."""

from __future__ import annotations

import pytest

from dynrt.transfer.decode_end import QUIET_S, DecodeEnd, ReadChecksum
from dynrt.transfer.effects import DecodeEffect, Order, Tell
from dynrt.transfer.events import (
    CancelHandoff,
    Cause,
    Committed,
    Drained,
    FirstToken,
    LeaseExpired,
    PeerQuiesced,
    RenewLease,
    Reserved,
)
from dynrt.transfer.layout import KvGeometry
from dynrt.transfer.local import CommitBlocks, ReleaseBlocks, ReservationMade
from dynrt.transfer.mapping import KvMapping
from dynrt.transfer.notifications import SenderQuiesced, UnitsWritten
from dynrt.transfer.units import UnitRange

KEY = b"k" * 16
ID = (KEY, 1)
TOKEN = FirstToken(*ID, token_id=42, chars_emitted=3)
COMMIT = Order(CommitBlocks(*ID, 42))
RELEASE = Order(ReleaseBlocks(*ID))
ALL = UnitsWritten(*ID, UnitRange(0, 0, 2, 0, 2))
HALF = UnitsWritten(*ID, UnitRange(0, 0, 1, 0, 2))


def ranks(count: int, block_size: int = 1) -> list[KvGeometry]:
    """One head each, and blocks of a token unless told otherwise."""
    return [
        KvGeometry(2, 64, block_size, 1, 4, "float32", first_head=rank, total_kv_heads=count)
        for rank in range(count)
    ]


def idle_end(
    num_ranks: int = 1, read_checksum: ReadChecksum | None = None, takes_first_token: bool = True
) -> DecodeEnd:
    end = DecodeEnd(ranks(num_ranks), "here", read_checksum, takes_first_token)
    assert isinstance(end.introduce("peer", ranks(num_ranks)), KvMapping)
    return end


def decode_end(block_ids: list[int] | None = None, lease_s: float = 30.0) -> DecodeEnd:
    """With one reservation of two blocks in two layers, unless told otherwise."""
    end = idle_end()
    reserve(end, [5, 6] if block_ids is None else block_ids, lease_s)
    return end


def reserve(end: DecodeEnd, block_ids: list[int], lease_s: float = 30.0) -> list[DecodeEffect]:
    return end.reserved(ReservationMade(*ID, "peer", 3, block_ids, lease_s, 3 + len(block_ids)), now=1.0)


def drained(reason: str, cause: Cause = "cancelled") -> list[DecodeEffect]:
    return [RELEASE, Tell(Drained(*ID, reason, cause))]


def test_a_reservation_is_answered_with_its_target_and_its_units() -> None:
    end = idle_end(num_ranks=2)
    assert reserve(end, [5, 6]) == [Tell(Reserved(*ID, 3, [5, 6], 5))]


@pytest.mark.parametrize("token_first", [True, False])
def test_it_commits_on_the_last_unit_and_the_first_token_in_either_order(token_first: bool) -> None:
    end = decode_end()
    end.notified(HALF, now=2.0)
    committed = [Tell(Committed(*ID, received_at=4.0, host="here")), COMMIT]
    if token_first:
        assert end.first_token(TOKEN) == []
        assert end.notified(ALL, now=4.0) == committed
    else:
        assert end.notified(ALL, now=4.0) == []
        assert end.notified(HALF, now=5.0) == []  # nothing new: not received then
        assert end.first_token(TOKEN) == committed
    assert end.num_open == 0


def test_an_engine_that_samples_the_first_token_commits_on_the_last_unit() -> None:
    end = idle_end(takes_first_token=False)
    reserve(end, [5, 6])
    commit = Order(CommitBlocks(*ID, None))
    assert end.notified(ALL, now=4.0) == [Tell(Committed(*ID, received_at=4.0, host="here")), commit]
    end = idle_end(takes_first_token=False)
    assert commit in reserve(end, []), "a full hit has nothing to wait for"


def test_a_full_hit_commits_on_the_first_token_alone() -> None:
    end = decode_end(block_ids=[])
    assert end.first_token(TOKEN) == [Tell(Committed(*ID, received_at=1.0, host="here")), COMMIT]


def test_whether_a_last_layer_is_awaited_is_known_at_each_poll() -> None:
    end = decode_end()

    def is_awaited() -> bool:
        assert end.polled(now=2.0) == []
        return end.awaits_last_layer

    assert not is_awaited(), "nothing has come"
    end.notified(HALF, now=2.0)
    assert is_awaited()
    end.notified(ALL, now=2.0)
    assert not is_awaited(), "all is there, and only a token to come"


def test_a_first_token_before_the_reservation_is_kept() -> None:
    end = idle_end()
    assert end.first_token(TOKEN) == []
    reserved, *commit = reserve(end, [])
    assert reserved == Tell(Reserved(*ID, 3, [], 3))
    assert commit == [Tell(Committed(*ID, 1.0, "here")), COMMIT]


def test_a_cancel_frees_only_when_the_peer_is_quiet() -> None:
    end = decode_end()
    assert end.cancel(CancelHandoff(*ID, "gone")) == []
    assert end.first_token(TOKEN) == [] and end.notified(HALF, 2.0) == []
    assert end.peer_quiesced(PeerQuiesced(*ID), 3.0) == drained("gone")
    assert end.peer_quiesced(PeerQuiesced(*ID), 3.0) == []


def test_a_cancel_frees_when_the_last_unit_has_come() -> None:
    end = decode_end()
    end.cancel(CancelHandoff(*ID, "gone"))
    assert end.notified(ALL, 2.0) == drained("gone")


def test_a_cancel_frees_at_once_if_nothing_can_be_in_flight() -> None:
    end = decode_end()
    end.notified(ALL, 2.0)
    assert end.cancel(CancelHandoff(*ID, "gone")) == drained("gone")


def test_a_cancel_after_the_commit_is_left_to_the_engine() -> None:
    end = decode_end(block_ids=[])
    end.first_token(TOKEN)
    assert end.cancel(CancelHandoff(*ID, "gone")) == []


def test_a_cancel_before_the_reservation_gives_it_back_unannounced() -> None:
    end = idle_end()
    end.first_token(TOKEN)
    assert end.cancel(CancelHandoff(*ID, "gone")) == [Tell(Drained(*ID, "gone"))]
    assert reserve(end, [5, 6]) == [RELEASE]
    assert end.first_token(TOKEN) == [] and end.num_open == 0


def test_a_peer_that_stops_early_fails_the_handoff() -> None:
    end = decode_end()
    stopped = SenderQuiesced(*ID, clean=True)
    assert end.notified(stopped, 2.0) == drained(
        "the prefill end stopped before it had sent all", "transport"
    )


def test_a_peer_that_stops_after_all_has_come_changes_nothing() -> None:
    end = decode_end()
    end.notified(ALL, 2.0)
    assert end.peer_quiesced(PeerQuiesced(*ID), 3.0) == []
    assert COMMIT in end.first_token(TOKEN)


def quiet_at(end: DecodeEnd, since: float) -> list[DecodeEffect]:
    """Poll until it drains, checking that this takes three polls and the quiet time."""
    assert end.polled(since) == end.polled(since + QUIET_S / 2) == end.polled(since + QUIET_S * 0.9) == []
    return end.polled(since + QUIET_S * 1.1)


def test_after_a_fence_it_polls_until_quiet() -> None:
    end = decode_end()
    end.fence("another", 2.0)
    end.fence("peer", 2.0)
    assert end.polled(2.0 + QUIET_S) == []  # quiet for long enough, but polled once
    assert end.notified(HALF, 2.5) == []  # late bytes: the wait begins again
    assert quiet_at(end, 2.5) == drained("prefill worker peer is dead", "fenced")


def test_after_an_unclean_stop_it_polls_until_quiet() -> None:
    end = decode_end()
    end.cancel(CancelHandoff(*ID, "gone"))
    assert end.peer_quiesced(PeerQuiesced(*ID, clean=False), 2.0) == []
    assert end.peer_quiesced(PeerQuiesced(*ID, clean=True), 2.0) == []
    assert quiet_at(end, 2.0) == drained("gone")


def test_three_polls_are_not_enough_without_the_time() -> None:
    end = decode_end()
    end.fence("peer", 2.0)
    assert [effect for poll in range(50) for effect in end.polled(2.0 + poll / 1000)] == []


def test_a_fence_after_the_last_unit_changes_nothing() -> None:
    end = decode_end()
    end.notified(ALL, 2.0)
    end.fence("peer", 2.0)
    assert COMMIT in end.first_token(TOKEN)


def test_what_arrives_late_after_a_fence_never_commits() -> None:
    end = decode_end()
    end.first_token(TOKEN)
    end.fence("peer", 2.0)
    assert end.notified(ALL, 2.0) == []
    assert quiet_at(end, 2.0) == drained("prefill worker peer is dead", "fenced")


def test_a_reservation_for_a_peer_that_died_meanwhile_is_given_back() -> None:
    end = idle_end()
    end.fence("peer", 0.5)
    assert reserve(end, [5, 6]) == drained("prefill worker peer is dead", "fenced")


def test_an_expired_lease_starts_a_cancel_and_frees_nothing() -> None:
    end = decode_end(lease_s=10.0)
    assert end.polled(10.9) == []
    assert end.polled(11.0) == [Tell(LeaseExpired(*ID, "peer"))]
    assert end.polled(20.9) == [] and end.num_open == 1
    assert end.polled(21.0) == [Tell(LeaseExpired(*ID, "peer"))], (
        "said again, to a runtime that may be another"
    )
    assert end.peer_quiesced(PeerQuiesced(*ID), 1000.0) == drained("the lease expired", "lease")


def test_a_renewed_lease_does_not_expire() -> None:
    end = decode_end(lease_s=10.0)
    end.renew(RenewLease([ID, (b"x" * 16, 1)], 10.0), now=9.0)
    assert end.polled(18.9) == []
    assert end.polled(19.0) == [Tell(LeaseExpired(*ID, "peer"))]


def test_units_of_unknown_handoffs_are_dropped() -> None:
    end = idle_end()
    assert end.notified(ALL, 1.0) == [] and end.num_open == 0


def test_a_handoff_whose_blocks_are_not_what_was_sent_is_not_committed() -> None:
    memory = {(0, layer, block): 10 * layer + block for layer in range(2) for block in (5, 6)}
    end = idle_end(read_checksum=lambda cells, layer, block: memory[cells.rank, layer, block])
    reserve(end, [5, 6])
    sent = tuple(memory.values())
    end.notified(UnitsWritten(*ID, UnitRange(0, 0, 2, 0, 2), sent), 2.0)
    memory[0, 1, 6] = 99
    reason = "rank 0, layer 1, block 6 has checksum 99, sent was 16"
    assert end.first_token(FirstToken(*ID, 42, 3)) == drained(reason, "checksum")


def test_a_handoff_whose_blocks_are_what_was_sent_is_committed() -> None:
    end = idle_end(read_checksum=lambda cells, layer, block: 10 * layer + block)
    reserve(end, [5, 6])
    end.first_token(FirstToken(*ID, 42, 3))
    for layer in range(2):
        sent = (10 * layer + 5, 10 * layer + 6)
        effects = end.notified(UnitsWritten(*ID, UnitRange(0, layer, 1, 0, 2), sent), 2.0)
    assert Order(CommitBlocks(*ID, 42)) in effects


def test_blocks_that_came_without_checksums_cannot_be_verified() -> None:
    end = idle_end(read_checksum=lambda cells, layer, block: 7)
    reserve(end, [5])
    end.first_token(FirstToken(*ID, 42, 3))
    reason = "rank 0, layer 0, block 5 has checksum 7, sent was None"
    units = UnitRange(0, 0, 2, 0, 1)
    assert end.notified(UnitsWritten(*ID, units), 2.0) == drained(reason, "checksum")


def test_a_reservation_for_a_peer_that_was_never_introduced_is_given_back() -> None:
    end = DecodeEnd(ranks(1), "here")
    assert reserve(end, [5, 6]) == drained("peer was never introduced", "refused")


def test_every_route_counts_by_itself() -> None:
    """Two ranks push to one: pieces of the first rank's are not those of the second."""
    wide = KvGeometry(2, 64, 1, 2, 4, "float32")
    end = DecodeEnd([wide], "here")
    end.introduce("peer", ranks(2))
    reserve(end, [5, 6])
    end.first_token(TOKEN)
    assert end.notified(ALL, 2.0) == end.notified(ALL, 2.5) == []
    assert COMMIT in end.notified(UnitsWritten(*ID, UnitRange(1, 0, 2, 0, 2)), 3.0)


@pytest.mark.parametrize(
    ("ours", "theirs", "num_tokens", "block_ids", "num_pieces"),
    [(4, 1, 18, [5, 6], 6), (1, 4, 18, [*range(15)], 15), (4, 4, 18, [5, 6], 2), (4, 1, 12, [], 0)],
    ids=["pushed by smaller blocks", "by larger blocks", "by alike blocks", "the whole prompt was a hit"],
)
def test_units_are_counted_by_tokens(
    ours: int, theirs: int, num_tokens: int, block_ids: list[int], num_pieces: int
) -> None:
    """3 blocks of ours are a prefix hit."""
    end = DecodeEnd(ranks(1, ours), "here")
    end.introduce("peer", ranks(1, theirs))
    end.reserved(ReservationMade(*ID, "peer", 3, block_ids, 30.0, num_tokens), now=1.0)
    effects = end.first_token(TOKEN)
    if num_pieces:
        assert end.notified(UnitsWritten(*ID, UnitRange(0, 0, 2, 0, num_pieces - 1)), 2.0) == []
        effects = end.notified(UnitsWritten(*ID, UnitRange(0, 0, 2, num_pieces - 1, 1)), 2.0)
    assert COMMIT in effects
