"""The prefill end alone: what it posts, when it lets go of source blocks, and what late messages do."""

from __future__ import annotations

from dynrt.transfer.effects import Notify, Order, PrefillEffect, Tell
from dynrt.transfer.events import Arm, CancelHandoff, Quiesced, Retarget, Sent, Stalled
from dynrt.transfer.layout import KvGeometry
from dynrt.transfer.local import BlocksReady, PrefillOpened, ReleaseBlocks
from dynrt.transfer.mapping import KvMapping
from dynrt.transfer.notifications import SenderQuiesced, decode
from dynrt.transfer.prefill_end import STALL_S, PrefillEnd
from dynrt.transfer.units import UnitRange
from dynrt.transfer.window import MAX_WRITE_BYTES, WINDOW_WRITES
from dynrt.transfer.write import Write

NUM_LAYERS = 3
BLOCK_BYTES = 100
KEY = b"k" * 16
ID = (KEY, 1)
RELEASE = Order(ReleaseBlocks(*ID))


def ranks(count: int, block_bytes: int, num_layers: int, block_size: int = 1) -> list[KvGeometry]:
    """One head each, and blocks of a token unless told otherwise."""
    head_size = block_bytes // block_size // 4
    return [
        KvGeometry(num_layers, 64, block_size, 1, head_size, "float16", first_head=rank, total_kv_heads=count)
        for rank in range(count)
    ]


def idle_end(num_ranks: int = 1, block_bytes: int = BLOCK_BYTES, num_layers: int = NUM_LAYERS) -> PrefillEnd:
    """With two peers of its own shape."""
    geometry = ranks(num_ranks, block_bytes, num_layers)
    end = PrefillEnd(geometry)
    for peer in ("peer", "other"):
        assert isinstance(end.introduce(peer, geometry), KvMapping)
    return end


def prefill_end(
    num_ranks: int = 1, block_bytes: int = BLOCK_BYTES, num_layers: int = NUM_LAYERS
) -> PrefillEnd:
    end = idle_end(num_ranks, block_bytes, num_layers)
    assert end.opened(PrefillOpened(*ID)) == []
    return end


def target(first_block: int, block_ids: list[int]) -> Arm:
    """Of a prompt that ends with these blocks."""
    return Arm(*ID, "peer", first_block, block_ids, first_block + len(block_ids))


def ready(first_block: int, block_ids: list[int], num_tokens: int, *, written: bool = False) -> BlocksReady:
    return BlocksReady(*ID, first_block, block_ids, written, num_tokens)


def write_layers(end: PrefillEnd) -> list[PrefillEffect]:
    return [effect for layer in range(NUM_LAYERS) for effect in end.layer_written(layer, float(layer))]


def writes(end: PrefillEnd) -> list[Write]:
    """All that may be posted now."""
    posted = []
    while (write := end.next_write(0.0)) is not None:
        end.write_posted(write, 0.25)
        posted.append(write)
    return posted


def finish(end: PrefillEnd, posted: list[Write]) -> list[PrefillEffect]:
    return [effect for write in posted for effect in end.write_done(write, 0.0, 1e-3)]


def test_layers_wait_for_the_target_and_then_go_in_one_piece() -> None:
    end = prefill_end()
    end.step_begins([ready(0, [7, 8], 2)], 0.0)
    write_layers(end)
    assert writes(end) == []
    end.arm(target(0, [3, 4]))
    (write,) = writes(end)
    assert (write.id, write.peer, write.units) == (ID, "peer", UnitRange(0, 0, 3, 0, 2))
    assert (write.source_pieces, write.target_pieces) == ([7, 8], [3, 4])
    assert write.num_bytes == 6 * BLOCK_BYTES


def test_with_a_target_each_layer_goes_when_it_is_written() -> None:
    end = prefill_end()
    end.arm(target(0, [3]))
    end.step_begins([ready(0, [7], 1)], 0.0)
    assert writes(end) == []
    for layer in range(NUM_LAYERS):
        end.layer_written(layer, float(layer))
        assert [write.units for write in writes(end)] == [UnitRange(0, layer, 1, 0, 1)]


def test_a_prefix_hit_goes_before_what_is_computed_and_what_decode_holds_is_not_sent() -> None:
    end = prefill_end()
    end.arm(target(1, [30, 31, 32]))
    end.step_begins([ready(0, [10, 11], 4, written=True), ready(2, [12, 13], 4)], 0.0)
    (hit,) = writes(end)
    assert (hit.units, hit.source_pieces, hit.target_pieces) == (UnitRange(0, 0, 3, 0, 1), [11], [30])
    end.layer_written(0, 0.0)
    (first,) = writes(end)
    assert (first.units, first.source_pieces, first.target_pieces) == (
        UnitRange(0, 0, 1, 1, 2),
        [12, 13],
        [31, 32],
    )


def test_every_rank_pushes_its_own_part() -> None:
    end = prefill_end(num_ranks=2)
    end.arm(target(0, [3]))
    end.step_begins([ready(0, [7], 1, written=True)], 0.0)
    assert [write.source_rank for write in writes(end)] == [0, 1]


def test_a_write_is_cut_so_that_it_does_not_keep_the_thread() -> None:
    end = prefill_end(block_bytes=MAX_WRITE_BYTES)
    end.arm(target(0, [3]))
    end.step_begins([ready(0, [7], 1, written=True)], 0.0)
    assert [write.units.num_layers for write in writes(end)] == [1, 1, 1]


def test_sent_and_released_when_the_last_write_is_done_and_not_before() -> None:
    end = prefill_end()
    end.arm(target(0, [3, 4]))
    end.step_begins([ready(0, [7], 2)], 0.0)
    write_layers(end)
    assert finish(end, writes(end)) == []  # the second block is still to come
    end.step_begins([ready(1, [8], 2)], 0.0)
    write_layers(end)
    *others, last = writes(end)
    assert finish(end, others) == []
    sent = Sent(*ID, kv_bytes=600, num_writes=2, post_s=0.5, link_s=1e-3)  # on the link one after the other
    assert finish(end, [last]) == [RELEASE, Tell(sent)]
    assert end.num_open == 0


def test_a_full_hit_on_decode_is_sent_once_the_prompt_is_computed() -> None:
    end = prefill_end()
    end.arm(target(1, []))
    assert end.step_begins([ready(0, [7], 1)], 0.0) == []
    assert write_layers(end) == [RELEASE, Tell(Sent(*ID, 0, 0, 0.0, 0.0))]


def test_blocks_announced_again_after_a_preemption_are_not_pushed_again() -> None:
    end = prefill_end()
    end.arm(target(0, [3, 4, 5]))
    end.step_begins([ready(0, [7, 8], 3)], 0.0)
    write_layers(end)
    finish(end, writes(end))
    end.step_begins([ready(0, [17, 18, 19], 3)], 0.0)
    write_layers(end)
    (again,) = writes(end)
    assert (again.source_pieces, again.target_pieces) == ([19], [5])


def test_a_cancel_posts_nothing_more_and_waits_for_what_was_posted() -> None:
    end = prefill_end()
    end.arm(target(0, [3]))
    end.step_begins([ready(0, [7], 1)], 0.0)
    end.layer_written(0, 0.0)
    posted = writes(end)
    assert end.cancel(CancelHandoff(*ID, "gone")) == []
    end.layer_written(1, 1.0)
    assert writes(end) == []
    notify, release, tell = finish(end, posted)
    assert isinstance(notify, Notify) and notify.peer == "peer"
    assert decode(notify.notification) == SenderQuiesced(*ID, clean=True)
    assert (release, tell) == (RELEASE, Tell(Quiesced(*ID, "gone")))


def test_a_failed_write_quiesces_uncleanly_when_the_others_are_done() -> None:
    end = prefill_end()
    end.arm(target(0, [3]))
    end.step_begins([ready(0, [7], 1)], 0.0)
    end.layer_written(0, 0.0)
    end.layer_written(1, 1.0)
    first, *rest = [*writes(end), None]
    assert first is not None and rest == [None]
    end.layer_written(2, 2.0)
    (second,) = writes(end)
    assert end.write_failed(first, "reset") == []
    notify, release, tell = end.write_done(second, 0.0, 1e-3)
    assert isinstance(notify, Notify) and decode(notify.notification) == SenderQuiesced(*ID, clean=False)
    assert (release, tell) == (RELEASE, Tell(Quiesced(*ID, "reset", clean=False, cause="transport")))


def test_a_fence_waits_for_nothing() -> None:
    end = prefill_end()
    end.arm(target(0, [3]))
    end.step_begins([ready(0, [7], 1, written=True)], 0.0)
    posted = writes(end)
    assert end.fence("another") == []
    assert end.fence("peer") == [RELEASE, Tell(Quiesced(*ID, "decode worker peer is dead", cause="fenced"))]
    assert finish(end, posted) == [] and end.write_failed(posted[0], "late") == []


def test_a_target_of_another_length_than_the_prompt_stops_the_handoff() -> None:
    end = prefill_end()
    end.step_begins([ready(0, [7], 2)], 0.0)
    *_, tell = end.arm(target(0, [3]))
    reason = "the prompt has 2 tokens, decode reserved for 1"
    assert tell == Tell(Quiesced(*ID, reason, cause="mismatch"))


def test_a_cancel_before_all_else_keeps_everything_late_from_opening_the_handoff() -> None:
    end = idle_end()
    assert end.cancel(CancelHandoff(*ID, "gone")) == [Tell(Quiesced(*ID, "gone"))]
    assert end.opened(PrefillOpened(*ID)) == [RELEASE]
    assert end.arm(target(0, [3])) == []
    assert end.step_begins([ready(0, [7], 1)], 0.0) == [RELEASE]
    assert write_layers(end) == [] and writes(end) == [] and end.num_open == 0
    assert end.cancel(CancelHandoff(*ID, "again")) == [Tell(Quiesced(*ID, "again"))]


def test_an_arm_before_the_prompt_is_opened_counts() -> None:
    end = idle_end()
    end.arm(target(0, [3]))
    end.arm(target(0, [9]))  # told twice: the first counts
    end.opened(PrefillOpened(*ID))
    end.step_begins([ready(0, [7], 1, written=True)], 0.0)
    assert [write.target_pieces for write in writes(end)] == [[3]]


def test_no_more_is_posted_to_a_peer_than_its_window_and_the_rest_goes_together() -> None:
    end = prefill_end(num_layers=8)
    end.arm(target(0, [3]))
    end.step_begins([ready(0, [7], 1)], 0.0)
    posted = []
    for layer in range(8):
        end.layer_written(layer, float(layer))
        posted += writes(end)
    assert [write.units.num_layers for write in posted] == [1] * WINDOW_WRITES
    finish(end, posted[:1])
    assert [write.units for write in writes(end)] == [UnitRange(0, 4, 4, 0, 1)]


def test_another_peer_has_a_window_of_its_own() -> None:
    end = prefill_end(num_layers=8)
    end.arm(target(0, [3]))
    end.arm(Arm(b"o" * 16, 1, "other", 0, [5], 1))
    end.step_begins([ready(0, [7], 1), BlocksReady(b"o" * 16, 1, 0, [8], False, 1)], 0.0)
    posted = []
    for layer in range(8):
        end.layer_written(layer, float(layer))
        posted += writes(end)
    assert sorted(write.peer for write in posted) == ["other"] * WINDOW_WRITES + ["peer"] * WINDOW_WRITES


def test_the_request_nearest_its_end_goes_first() -> None:
    end = prefill_end()
    near = b"n" * 16
    end.arm(target(0, [3, 4, 5]))
    end.arm(Arm(near, 1, "peer", 0, [6], 1))
    end.step_begins([ready(0, [7], 3), BlocksReady(near, 1, 0, [8], False, 1)], 0.0)
    end.layer_written(0, 0.0)
    assert [write.id[0] for write in writes(end)] == [near, KEY]


def test_nothing_is_posted_to_a_peer_whose_connection_is_broken() -> None:
    end = prefill_end()
    end.arm(target(0, [3]))
    end.step_begins([ready(0, [7], 1, written=True)], 0.0)
    end.hold("peer")
    assert writes(end) == []
    end.resume("peer")
    assert len(writes(end)) == 1


def test_writes_that_do_not_end_are_told_once_and_nothing_more_is_posted() -> None:
    end = prefill_end()
    end.arm(target(0, [3]))
    end.step_begins([ready(0, [7], 1)], 0.0)
    end.layer_written(0, 0.0)
    posted = writes(end)
    assert end.polled(STALL_S - 0.1) == []
    assert end.polled(STALL_S) == [Tell(Stalled(*ID))]
    assert end.polled(2 * STALL_S) == []
    end.layer_written(1, 1.0)
    assert writes(end) == []
    *_, tell = finish(end, posted)
    assert tell == Tell(Quiesced(*ID, "its writes do not end", cause="transport"))


def computed_for_nobody() -> PrefillEnd:
    """A finished prompt of two blocks that has no target."""
    end = prefill_end()
    end.step_begins([ready(0, [7, 8], 2)], 0.0)
    write_layers(end)
    assert writes(end) == []
    return end


def test_a_finished_prompt_waits_for_another_target_under_another_epoch() -> None:
    end = computed_for_nobody()
    assert end.retarget(Retarget(*ID, 4)) == end.retarget(Retarget(*ID, 4)) == []
    assert end.arm(Arm(*ID, "old", 0, [1, 2], 2)) == [] and writes(end) == [], "the old epoch is over"
    end.arm(Arm(KEY, 4, "peer", 0, [1, 2], 2))
    (write,) = writes(end)
    assert (write.id, write.peer, write.source_pieces) == ((KEY, 4), "peer", [7, 8])
    release, told = end.write_done(write, 0.0, 1.0)
    assert release == RELEASE, "the engine knows its blocks by the epoch that computed them"
    assert isinstance(told, Tell) and isinstance(told.message, Sent) and told.message.id == (KEY, 4)
    assert end.num_open == 0


def test_it_can_be_moved_again_and_cancelled() -> None:
    end = computed_for_nobody()
    end.retarget(Retarget(*ID, 4))
    end.retarget(Retarget(KEY, 4, 5))
    assert end.cancel(CancelHandoff(KEY, 4, "late")) == [Tell(Quiesced(KEY, 4, "late"))], (
        "a tombstone's answer"
    )
    assert end.cancel(CancelHandoff(KEY, 5, "gone")) == [RELEASE, Tell(Quiesced(KEY, 5, "gone"))]


def test_layers_that_are_seen_late_count_for_the_new_epoch() -> None:
    """On CUDA the transfer thread hears of the last layers only when their event has happened."""
    end = prefill_end()
    end.step_begins([ready(0, [7], 2)], 0.0)
    write_layers(end)
    end.step_begins([ready(1, [8], 2)], 1.0)
    end.retarget(Retarget(*ID, 4))
    end.arm(Arm(KEY, 4, "peer", 0, [1, 2], 2))
    write_layers(end)
    assert sorted(source for write in writes(end) for source in write.source_pieces) == [7, 8]


def test_what_has_a_target_or_is_over_is_not_moved() -> None:
    answer = [Tell(Quiesced(KEY, 4, "the prompt that was to be moved is over"))]
    end = computed_for_nobody()
    end.arm(target(0, [1, 2]))
    assert end.retarget(Retarget(*ID, 4)) == answer and end.num_open == 1
    end = computed_for_nobody()
    end.cancel(CancelHandoff(*ID, "gone"))
    assert end.retarget(Retarget(*ID, 4)) == answer and end.num_open == 0
    assert end.arm(Arm(KEY, 4, "peer", 0, [1, 2], 2)) == [] and end.num_open == 0


def test_a_target_of_larger_blocks_is_filled_piece_by_piece_from_where_its_own_hit_ends() -> None:
    """Ours are blocks of 1 token, theirs of 4, of which they hold the first; the prompt has 10 tokens."""
    end = prefill_end()
    end.introduce("peer", ranks(1, 4 * BLOCK_BYTES, NUM_LAYERS, block_size=4))
    end.arm(Arm(*ID, "peer", 1, [30, 20], 10))
    end.step_begins([ready(0, [1, 2, 3], 10, written=True), ready(3, [4, 5, 6, 7, 8, 9, 10], 10)], 0.0)
    assert writes(end) == []  # all of the hit is theirs already
    write_layers(end)
    (write,) = writes(end)
    assert (write.units.first_piece, write.source_pieces) == (0, [5, 6, 7, 8, 9, 10])
    assert write.target_pieces == [120, 121, 122, 123, 80, 81]
    assert Tell(Sent(*ID, 6 * 3 * BLOCK_BYTES, 1, 0.25, 1e-3)) in finish(end, [write])


def test_a_target_of_smaller_blocks_takes_the_pieces_that_hold_tokens() -> None:
    """Ours are blocks of 1 token; seen from their side, of 4 against 1: 6 tokens, 3 of them held there."""
    geometry = ranks(1, 4 * BLOCK_BYTES, NUM_LAYERS, block_size=4)
    end = PrefillEnd(geometry)
    end.introduce("peer", ranks(1, BLOCK_BYTES, NUM_LAYERS))
    end.opened(PrefillOpened(*ID))
    end.step_begins([ready(0, [7, 8], 6)], 0.0)
    write_layers(end)
    end.arm(Arm(*ID, "peer", 3, [5, 40, 41], 6))
    (write,) = writes(end)
    assert (write.source_pieces, write.target_pieces) == ([31, 32, 33], [5, 40, 41])
    assert (write.units, write.num_bytes) == (UnitRange(0, 0, 3, 0, 3), 9 * BLOCK_BYTES)


def test_a_handoff_to_a_peer_that_was_never_introduced_ends() -> None:
    end = prefill_end()
    *_, tell = end.arm(Arm(*ID, "stranger", 0, [3], 1))
    assert tell == Tell(Quiesced(*ID, "stranger is not connected", cause="transport"))
