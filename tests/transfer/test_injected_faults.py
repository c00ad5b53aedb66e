"""What goes wrong in transfers elsewhere, injected between two real processes; each test names the kind of bug."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kv_process import KvProcess, KvProcesses, connect

from dynrt.transfer.events import (
    Arm,
    CancelHandoff,
    Committed,
    ConnectPeer,
    Drained,
    FirstToken,
    HandoffId,
    PeerConnected,
    PeerQuiesced,
    Quiesced,
    Reserved,
    Sent,
    Stalled,
)
from dynrt.transfer.faults import Fault
from dynrt.transfer.layout import KvGeometry
from dynrt.transfer.local import BlocksReady, CommitBlocks, PrefillOpened, ReleaseBlocks, ReservationMade
from dynrt.transfer.options import TransferOptions
from dynrt.transfer.prefill_end import STALL_S
from dynrt.transfer.throttle import LinkSpeed
from dynrt.transfer.ucx import ucx_environment

GEOMETRY = KvGeometry(
    num_layers=4, num_blocks=16, block_size=32, num_kv_heads=4, head_size=64, dtype="float32"
)


def tokens(num_blocks: int) -> int:
    """Of a prompt of so many blocks."""
    return num_blocks * GEOMETRY.block_size


StartPair = Callable[..., tuple[KvProcess, KvProcess]]


@pytest.fixture
def start_pair(tmp_path: Path) -> Iterator[StartPair]:
    """Two connected workers; the prefill worker's transport has these options."""
    processes = KvProcesses(ucx_environment(one_host=True)["UCX_TLS"], GEOMETRY, tmp_path)

    def start(*faults: Fault, verify: bool = False, **options: object) -> tuple[KvProcess, KvProcess]:
        prefill = processes.start("prefill", TransferOptions(verify=verify, faults=faults, **options))  # type: ignore[arg-type]
        decode = processes.start("decode", TransferOptions(verify=verify))
        prefill.await_start()
        decode.await_start()
        decode.post(ConnectPeer(prefill.incarnation, [], [], [GEOMETRY], will_push=False))
        prefill.post(connect(prefill, decode))
        assert prefill.expect(PeerConnected) == PeerConnected(decode.incarnation)
        return prefill, decode

    try:
        yield start
    finally:
        processes.close()


@pytest.fixture
def handoff() -> HandoffId:
    return secrets.token_bytes(16), 1


SOURCES, TARGETS = [1, 2], [5, 6]  # a prefix hit and a block to compute: at least two writes


def begin(handoff: HandoffId, prefill: KvProcess, decode: KvProcess, shift: int = 0) -> None:
    """Push two blocks, each layer of them filled with bytes of its own."""
    (hit, computed), targets = shifted(SOURCES, shift), shifted(TARGETS, shift)
    prefill.post(PrefillOpened(*handoff))
    decode.post(ReservationMade(*handoff, prefill.incarnation, 0, targets, 60.0, tokens(2)))
    reserved = decode.expect(Reserved, handoff)
    prefill.post(Arm(*handoff, decode.incarnation, 0, reserved.block_ids, tokens(2)))
    decode.post(FirstToken(*handoff, 7, 0))
    for layer in range(GEOMETRY.num_layers):
        fill(prefill, layer, hit)
    prefill.step_begins(
        [
            BlocksReady(*handoff, 0, [hit], True, tokens(2)),
            BlocksReady(*handoff, 1, [computed], False, tokens(2)),
        ]
    )
    for layer in range(GEOMETRY.num_layers):
        fill(prefill, layer, computed)
        prefill.layer_written(layer)


def shifted(block_ids: list[int], shift: int) -> list[int]:
    return [block_id + shift for block_id in block_ids]


def fill(process: KvProcess, layer: int, block: int) -> None:
    where = process.block(layer, block)
    process.memory[where] = bytes([1 + 16 * layer + block]) * (where.stop - where.start)


def commits(handoff: HandoffId, prefill: KvProcess, decode: KvProcess, shift: int = 0) -> None:
    """To its good end, with the right bytes."""
    assert decode.expect(CommitBlocks, handoff) and decode.expect(Committed, handoff)
    for source, target in zip(shifted(SOURCES, shift), shifted(TARGETS, shift), strict=True):
        for layer in range(GEOMETRY.num_layers):
            assert decode.memory[decode.block(layer, target)] == prefill.memory[prefill.block(layer, source)]


def fails(handoff: HandoffId, prefill: KvProcess, decode: KvProcess) -> Quiesced:
    """Both ends give up and let go."""
    quiesced = prefill.expect(Quiesced, handoff)
    assert decode.expect(Drained, handoff).cause == "transport"
    assert prefill.expect(ReleaseBlocks, handoff) and decode.expect(ReleaseBlocks, handoff)
    return quiesced


def succeeds(prefill: KvProcess, decode: KvProcess) -> None:
    """Another handoff between the two."""
    other = secrets.token_bytes(16), 9
    begin(other, prefill, decode, shift=2)
    commits(other, prefill, decode, shift=2)
    assert prefill.expect(Sent, other) and prefill.expect(ReleaseBlocks, other)


def is_over(prefill: KvProcess, decode: KvProcess) -> None:
    assert prefill.stop() == decode.stop() == 0, "a handoff was left open"


def test_writes_that_overtake_each_other_are_counted_not_ordered(
    start_pair: StartPair, handoff: HandoffId
) -> None:
    """A completion count that relies on the last message."""
    prefill, decode = start_pair(Fault("reorder", limit=1))
    begin(handoff, prefill, decode)
    commits(handoff, prefill, decode)
    assert prefill.expect(Sent, handoff) and prefill.expect(ReleaseBlocks, handoff)
    is_over(prefill, decode)


def test_a_delayed_write_delays_the_commit_and_nothing_is_used_before(
    start_pair: StartPair, handoff: HandoffId
) -> None:
    """Decode runs over blocks that have not arrived."""
    prefill, decode = start_pair(Fault("delay", limit=1, seconds=0.3))
    began_at = time.monotonic()
    begin(handoff, prefill, decode)
    commits(handoff, prefill, decode)
    assert time.monotonic() - began_at >= 0.3
    assert prefill.expect(ReleaseBlocks, handoff) and prefill.expect(Sent, handoff)
    is_over(prefill, decode)


def test_a_write_that_cannot_be_posted_fails_its_handoff_at_both_ends(
    start_pair: StartPair, handoff: HandoffId
) -> None:
    """A write that cannot start is skipped, and its receiver counts for ever."""
    prefill, decode = start_pair(Fault("refuse", limit=1))
    begin(handoff, prefill, decode)
    assert not fails(handoff, prefill, decode).clean
    succeeds(prefill, decode)
    is_over(prefill, decode)


def test_after_a_failed_write_the_connection_is_made_again(start_pair: StartPair, handoff: HandoffId) -> None:
    """A broken connection stays broken until both ends restart."""
    prefill, decode = start_pair(Fault("fail", limit=1))
    begin(handoff, prefill, decode)
    assert not fails(handoff, prefill, decode).clean
    broken = prefill.expect(PeerConnected)
    assert broken.error is not None and "being made again" in broken.error
    assert prefill.expect(PeerConnected) == PeerConnected(decode.incarnation)
    succeeds(prefill, decode)
    is_over(prefill, decode)


def test_a_lost_completion_keeps_the_source_pinned_and_is_reported(
    start_pair: StartPair, handoff: HandoffId
) -> None:
    """A completion is lost and its waiter hangs; decode has everything and does not wait for it."""
    prefill, decode = start_pair(Fault("drop", limit=1))
    begin(handoff, prefill, decode)
    commits(handoff, prefill, decode)
    began_at = time.monotonic()
    assert prefill.expect(Stalled, handoff)
    assert time.monotonic() - began_at > STALL_S / 2
    prefill.post(CancelHandoff(*handoff, "test"))
    succeeds(prefill, decode)  # and the peer is still there for others
    assert not [said for said in prefill.said if isinstance(said, ReleaseBlocks)]


def test_a_stalled_write_is_reported_and_frees_nothing_by_itself(
    start_pair: StartPair, handoff: HandoffId
) -> None:
    """A time-out frees memory that is still written to; cleanup waits for new work."""
    prefill, decode = start_pair(Fault("stall", limit=1))
    begin(handoff, prefill, decode)
    assert prefill.expect(Stalled, handoff)
    for end in (prefill, decode):
        end.post(CancelHandoff(*handoff, "test"))
    succeeds(prefill, decode)
    released = [said for end in (prefill, decode) for said in end.said if isinstance(said, ReleaseBlocks)]
    assert released == []
    assert not [said for said in decode.said if isinstance(said, Drained)]


def test_a_cancel_on_a_slow_link_waits_for_what_was_posted(start_pair: StartPair, handoff: HandoffId) -> None:
    """Pages go to the next request while the previous one's write is on its way."""
    layer_bytes = GEOMETRY.layer_block_bytes
    prefill, decode = start_pair(throttle=LinkSpeed(layer_bytes / 0.1))
    begin(handoff, prefill, decode)
    began_at = time.monotonic()
    for end in (decode, prefill):
        end.post(CancelHandoff(*handoff, "test"))
    assert prefill.expect(Quiesced, handoff).clean and decode.expect(Drained, handoff)
    assert time.monotonic() - began_at > 0.05, "it did not wait for the link"
    assert prefill.expect(ReleaseBlocks, handoff) and decode.expect(ReleaseBlocks, handoff)
    decode.post(PeerQuiesced(*handoff))
    is_over(prefill, decode)


def test_a_slow_link_is_as_slow_as_it_says(start_pair: StartPair, handoff: HandoffId) -> None:
    prefill, decode = start_pair(throttle=LinkSpeed(GEOMETRY.layer_block_bytes / 0.05, latency_s=0.05))
    began_at = time.monotonic()
    begin(handoff, prefill, decode)
    commits(handoff, prefill, decode)
    assert time.monotonic() - began_at >= 2 * GEOMETRY.num_layers * 0.05 + 0.05
    assert prefill.expect(ReleaseBlocks, handoff) and prefill.expect(Sent, handoff)
    is_over(prefill, decode)


def test_bytes_that_were_not_sent_fail_the_handoff_in_checksum_mode(
    start_pair: StartPair, handoff: HandoffId
) -> None:
    """Wrong KV is decoded in silence."""
    prefill, decode = start_pair(Fault("corrupt", limit=1), verify=True)
    begin(handoff, prefill, decode)
    drained = decode.expect(Drained, handoff)
    assert drained.cause == "checksum" and "block 5 has checksum" in drained.reason
    assert decode.expect(ReleaseBlocks, handoff)
    assert prefill.expect(ReleaseBlocks, handoff) and prefill.expect(Sent, handoff)
    succeeds(prefill, decode)
    is_over(prefill, decode)


def test_first_handoffs_to_two_peers_at_once_are_more_than_all_windows_together(
    tmp_path: Path,
) -> None:
    """First requests of several decode workers at once hang; more than a window deadlocks."""
    processes = KvProcesses("tcp", GEOMETRY, tmp_path)
    try:
        prefill, *decodes = workers = [processes.start(name) for name in ("prefill", "one", "two")]
        for worker in workers:
            worker.await_start()
        for decode in decodes:
            decode.post(ConnectPeer(prefill.incarnation, [], [], [GEOMETRY], will_push=False))
            prefill.post(connect(prefill, decode))
        wanted = [(decode, (secrets.token_bytes(16), 1), block) for block in range(16) for decode in decodes]
        for decode, handoff, block in wanted:
            offer(handoff, prefill, decode, block)
        prefill.step_begins(
            [BlocksReady(*handoff, 0, [block], False, tokens(1)) for _, handoff, block in wanted]
        )
        for layer in range(GEOMETRY.num_layers):
            for block in range(16):
                fill(prefill, layer, block)
            prefill.layer_written(layer)
        for decode, handoff, _ in wanted:
            assert decode.expect(Committed, handoff) and prefill.expect(Sent, handoff)
        assert all(bytes(decode.memory) == bytes(prefill.memory) for decode in decodes)
        assert [worker.stop() for worker in workers] == [0, 0, 0]
    finally:
        processes.close()


def offer(handoff: HandoffId, prefill: KvProcess, decode: KvProcess, block: int) -> None:
    """One block, from where it lies on prefill to the same place on decode."""
    prefill.post(PrefillOpened(*handoff))
    decode.post(ReservationMade(*handoff, prefill.incarnation, 0, [block], 60.0, tokens(1)))
    prefill.post(Arm(*handoff, decode.incarnation, 0, [block], tokens(1)))
    decode.post(FirstToken(*handoff, 7, 0))


def test_a_cancel_of_what_was_transferred_but_not_yet_used_frees_it(
    start_pair: StartPair, handoff: HandoffId
) -> None:
    """Transferred, waiting to be merged, aborted: leak; an abort right behind the last write."""
    prefill, decode = start_pair()
    prefill.post(PrefillOpened(*handoff))
    decode.post(ReservationMade(*handoff, prefill.incarnation, 0, [3], 60.0, tokens(1)))
    reserved = decode.expect(Reserved, handoff)
    prefill.post(Arm(*handoff, decode.incarnation, 0, reserved.block_ids, tokens(1)))
    prefill.step_begins([BlocksReady(*handoff, 0, [1], True, tokens(1))])
    assert prefill.expect(Sent, handoff) and prefill.expect(ReleaseBlocks, handoff)
    for _ in range(2):  # twice: the second finds a tombstone
        for end in (prefill, decode):
            end.post(CancelHandoff(*handoff, "test"))
        assert prefill.expect(Quiesced, handoff)
    decode.post(PeerQuiesced(*handoff))
    assert decode.expect(Drained, handoff) and decode.expect(ReleaseBlocks, handoff)
    succeeds(prefill, decode)
    is_over(prefill, decode)
