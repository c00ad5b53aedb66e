"""Handoffs between real processes over NIXL on host memory: shared memory, and TCP on the loopback interface."""

from __future__ import annotations

import secrets
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from kv_process import DEADLINE_S, FileEvent, KvProcess, KvProcesses, connect

from dynrt.transfer.events import (
    Arm,
    CancelHandoff,
    Committed,
    ConnectPeer,
    Drained,
    FencePeer,
    FirstToken,
    LeaseExpired,
    PeerConnected,
    PeerQuiesced,
    Quiesced,
    Reserved,
    Sent,
)
from dynrt.transfer.layout import KvGeometry
from dynrt.transfer.local import BlocksReady, CommitBlocks, PrefillOpened, ReleaseBlocks, ReservationMade
from dynrt.transfer.ucx import ucx_environment

GEOMETRY = KvGeometry(
    num_layers=4, num_blocks=32, block_size=128, num_kv_heads=8, head_size=64, dtype="float32"
)
SHARED_MEMORY = ucx_environment(one_host=True)["UCX_TLS"]


def tokens(num_blocks: int) -> int:
    """Of a prompt of so many blocks."""
    return num_blocks * GEOMETRY.block_size


class Pair(NamedTuple):
    """Two connected workers that the tests of this file share; tests that kill start another with `start`."""

    prefill: KvProcess
    decode: KvProcess
    start: Callable[[str], KvProcess]
    transports: str


@pytest.fixture(scope="module", params=[SHARED_MEMORY, "tcp"], ids=["default", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    processes = KvProcesses(request.param, GEOMETRY, tmp_path_factory.mktemp("kv"))
    try:
        prefill, decode = processes.start("prefill"), processes.start("decode")
        prefill.await_start()
        decode.await_start()
        make_connection(prefill, decode)
        yield Pair(prefill, decode, processes.start, request.param)
        assert prefill.stop() == decode.stop() == 0, "a handoff was left open"
    finally:
        processes.close()


@pytest.fixture
def handoff() -> tuple[bytes, int]:
    return secrets.token_bytes(16), 1


def make_connection(prefill: KvProcess, decode: KvProcess) -> None:
    decode.post(ConnectPeer(prefill.incarnation, [], [], [GEOMETRY], will_push=False))
    prefill.post(connect(prefill, decode))
    assert prefill.expect(PeerConnected) == PeerConnected(decode.incarnation, None)


def fill(process: KvProcess, layer: int, block: int) -> None:
    where = process.block(layer, block)
    process.memory[where] = bytes([1 + layer * 40 + block]) * (where.stop - where.start)


def compute(prefill: KvProcess, ready: list[BlocksReady]) -> None:
    """A step of the engine: what it completes is written layer by layer, and the hook told."""
    prefill.step_begins(ready)
    for layer in range(GEOMETRY.num_layers):
        for blocks in ready:
            for block in blocks.block_ids:
                fill(prefill, layer, block)
        prefill.layer_written(layer)


def reserve(
    handoff: tuple[bytes, int], prefill: KvProcess, decode: KvProcess, first_block: int, block_ids: list[int]
) -> Arm:
    """Blocks on decode, and how the prefill end hears of them."""
    num_tokens = tokens(first_block + len(block_ids))
    decode.post(ReservationMade(*handoff, prefill.incarnation, first_block, block_ids, 60.0, num_tokens))
    reserved = decode.expect(Reserved, handoff)
    assert reserved.block_ids == block_ids
    return Arm(*handoff, decode.incarnation, reserved.first_block, reserved.block_ids, num_tokens)


def push_once(prefill: KvProcess, decode: KvProcess) -> None:
    """A whole handoff, after which the connection between the two surely stands."""
    other = secrets.token_bytes(16), 7
    prefill.post(PrefillOpened(*other))
    prefill.post(reserve(other, prefill, decode, 0, [31]))
    decode.post(FirstToken(*other, 5, 0))
    compute(prefill, [BlocksReady(*other, 0, [30], False, tokens(1))])
    assert prefill.expect(ReleaseBlocks, other) and prefill.expect(Sent, other)
    assert decode.expect(CommitBlocks, other) and decode.expect(Committed, other)
    for layer in range(GEOMETRY.num_layers):
        assert decode.memory[decode.block(layer, 31)] == prefill.memory[prefill.block(layer, 30)]


def poll_on(decode: KvProcess, lease_s: float) -> None:
    """Keep the process polling for as long as a lease lasts."""
    other = secrets.token_bytes(16), 7
    decode.post(ConnectPeer("nobody", [], [], [GEOMETRY], will_push=False))
    decode.post(ReservationMade(*other, "nobody", 0, [0], lease_s, tokens(1)))
    assert decode.expect(LeaseExpired, other)
    decode.post(PeerQuiesced(*other))
    assert decode.expect(Drained, other) and decode.expect(ReleaseBlocks, other)


def test_every_byte_arrives_where_it_belongs_and_nothing_else_changes(
    pair: Pair, handoff: tuple[bytes, int]
) -> None:
    prefill, decode = pair.prefill, pair.decode
    before = bytes(decode.memory)
    prefill.post(PrefillOpened(*handoff))
    for layer in range(4):
        for block in (3, 4, 9):  # a prefix hit on the prefill worker
            fill(prefill, layer, block)
    # Prompt blocks 0 … 2 are prefix hits, 3 … 6 are computed in two steps; decode has the first block itself.
    hit = BlocksReady(*handoff, 0, [3, 4, 9], True, tokens(7))
    compute(prefill, [hit, BlocksReady(*handoff, 3, [20, 21], False, tokens(7))])
    target = reserve(handoff, prefill, decode, 1, [30, 6, 7, 8, 11, 2])
    prefill.post(target)
    compute(prefill, [BlocksReady(*handoff, 5, [22, 5], False, tokens(7))])
    assert prefill.expect(ReleaseBlocks, handoff)
    assert prefill.expect(Sent, handoff).kv_bytes == 24 * GEOMETRY.layer_block_bytes
    decode.post(FirstToken(*handoff, token_id=42, chars_emitted=3))
    assert decode.expect(CommitBlocks, handoff) == CommitBlocks(*handoff, 42)
    assert decode.expect(Committed, handoff).received_at <= time.monotonic()
    pushed = dict(zip(target.block_ids, [4, 9, 20, 21, 22, 5], strict=True))
    for layer in range(4):
        for block in range(32):
            where, source = decode.block(layer, block), pushed.get(block)
            ours = before[where] if source is None else prefill.memory[prefill.block(layer, source)]
            assert decode.memory[where] == ours, f"layer {layer}, block {block}"


def test_a_cancel_in_mid_push_quiesces_and_drains_over_nixl_alone(
    pair: Pair, handoff: tuple[bytes, int]
) -> None:
    prefill, decode = pair.prefill, pair.decode
    prefill.post(PrefillOpened(*handoff))
    prefill.post(reserve(handoff, prefill, decode, 0, [0, 1, 2, 3]))
    compute(prefill, [BlocksReady(*handoff, 0, [8, 9], False, tokens(4))])
    decode.post(CancelHandoff(*handoff, "test"))
    prefill.post(CancelHandoff(*handoff, "test"))
    assert prefill.expect(Quiesced, handoff).clean
    assert decode.expect(Drained, handoff).reason == "test"  # the runtime relayed nothing
    assert prefill.expect(ReleaseBlocks, handoff) and decode.expect(ReleaseBlocks, handoff)


def test_a_push_to_an_unknown_peer_fails_the_handoff_only(pair: Pair, handoff: tuple[bytes, int]) -> None:
    prefill = pair.prefill
    prefill.post(PrefillOpened(*handoff))
    prefill.post(Arm(*handoff, "nobody", 0, [0], tokens(1)))
    compute(prefill, [BlocksReady(*handoff, 0, [1], False, tokens(1))])
    assert "nobody is not connected" in prefill.expect(Quiesced, handoff).reason
    assert prefill.expect(ReleaseBlocks, handoff)


def test_a_peer_with_another_number_of_layers_is_refused(pair: Pair) -> None:
    pair.prefill.post(ConnectPeer("odd", pair.decode.metadata, [[1, 2, 3]], [GEOMETRY], will_push=True))
    assert "3 layers, not 4" in (pair.prefill.expect(PeerConnected).error or "")


def test_a_peer_whose_kv_cannot_be_mapped_is_refused(pair: Pair) -> None:
    odd = [msgspec.structs.replace(GEOMETRY, dtype="float16")]
    pair.prefill.post(ConnectPeer("odd", pair.decode.metadata, pair.decode.addresses, odd, will_push=True))
    told = pair.prefill.expect(PeerConnected)
    assert told.error == "dtype is 'float32' on prefill and 'float16' on decode"


def test_after_a_senders_death_blocks_are_freed_only_when_its_last_bytes_are_in(
    pair: Pair, handoff: tuple[bytes, int]
) -> None:
    """The receiver is stopped meanwhile: it had not been polling when the sender died."""
    decode, mortal = pair.decode, pair.start("mortal prefill")
    mortal.await_start()
    make_connection(mortal, decode)
    push_once(mortal, decode)
    target = reserve(handoff, mortal, decode, 0, list(range(32)))
    decode.signal(signal.SIGSTOP)
    mortal.post(PrefillOpened(*handoff))
    mortal.post(target)
    compute(mortal, [BlocksReady(*handoff, 0, list(range(31)), False, tokens(32))])
    if pair.transports == "tcp":
        await_unread_bytes(1 << 20)
    mortal.kill()
    before = bytes(decode.memory)
    decode.signal(signal.SIGCONT)
    decode.post(FencePeer(mortal.incarnation))
    assert decode.expect(Drained, handoff).reason == "prefill worker mortal prefill is dead"
    freed = bytes(decode.memory)
    assert pair.transports != "tcp" or freed != before, "no byte landed late: this run shows nothing"
    assert decode.expect(ReleaseBlocks, handoff)
    poll_on(decode, lease_s=0.3)
    assert bytes(decode.memory) == freed


def test_after_a_receivers_death_the_senders_blocks_come_back(pair: Pair, handoff: tuple[bytes, int]) -> None:
    prefill, mortal = pair.prefill, pair.start("mortal decode")
    mortal.await_start()
    make_connection(prefill, mortal)
    push_once(prefill, mortal)
    target = reserve(handoff, prefill, mortal, 0, list(range(32)))
    mortal.signal(signal.SIGSTOP)
    prefill.post(PrefillOpened(*handoff))
    prefill.post(target)
    compute(prefill, [BlocksReady(*handoff, 0, list(range(31)), False, tokens(32))])
    mortal.kill()
    prefill.post(FencePeer(mortal.incarnation))
    assert prefill.expect(Quiesced, handoff) and prefill.expect(ReleaseBlocks, handoff)
    push_once(prefill, pair.decode)  # its other peers are not disturbed


def test_a_layer_waits_for_its_cuda_event_and_holds_up_later_ones(
    pair: Pair, handoff: tuple[bytes, int], tmp_path: Path
) -> None:
    prefill, decode = pair.prefill, pair.decode
    happened = FileEvent(tmp_path / "event")
    prefill.post(PrefillOpened(*handoff))
    prefill.post(reserve(handoff, prefill, decode, 0, [12]))
    decode.post(FirstToken(*handoff, 1, 1))
    before = {layer: decode.memory[decode.block(layer, 12)] for layer in (1, 3)}
    prefill.step_begins([BlocksReady(*handoff, 0, [13], False, tokens(1))])
    for layer in range(4):
        fill(prefill, layer, 13)
        prefill.layer_written(layer, happened if layer == 1 else None)
    cancel_once(prefill, decode)
    assert all(decode.memory[decode.block(layer, 12)] == before[layer] for layer in before)
    happened.path.touch()
    assert prefill.expect(Sent, handoff) and prefill.expect(ReleaseBlocks, handoff)
    assert decode.expect(Committed, handoff) and decode.expect(CommitBlocks, handoff)
    assert decode.memory[decode.block(3, 12)] == prefill.memory[prefill.block(3, 13)]


def cancel_once(prefill: KvProcess, decode: KvProcess) -> None:
    """A handoff that only has to be cancelled, so that both threads surely went around several times."""
    other = secrets.token_bytes(16), 7
    prefill.post(PrefillOpened(*other))
    prefill.post(reserve(other, prefill, decode, 0, [31]))
    decode.post(CancelHandoff(*other, "test"))
    prefill.post(CancelHandoff(*other, "test"))
    assert prefill.expect(Quiesced, other) and prefill.expect(ReleaseBlocks, other)
    assert decode.expect(Drained, other) and decode.expect(ReleaseBlocks, other)


def test_a_failure_of_the_thread_is_reported(tmp_path: Path, handoff: tuple[bytes, int]) -> None:
    processes = KvProcesses("tcp", GEOMETRY, tmp_path)
    try:
        worker = processes.start("broken")
        worker.await_start()
        worker.post(PrefillOpened(*handoff))
        worker.step_begins([BlocksReady(*handoff, 0, [1], False, tokens(1))])
        worker.layer_written(2)  # before layers 0 and 1
        assert "layer 2 came after 0 layers" in worker.expect(str)
    finally:
        processes.close()


def loopback_sockets(table: str) -> list[tuple[str, str, int, str]]:
    """(local address, state, unread bytes, inode) of every socket in /proc/net/`table`."""
    rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    return [(row[1], row[3], int(row[4].split(":")[1], 16), row[9]) for row in rows]


def await_unread_bytes(num_bytes: int) -> None:
    """Until the kernel holds that much for a process that does not read it."""
    deadline = time.monotonic() + DEADLINE_S
    while sum(unread for _, state, unread, _ in loopback_sockets("tcp") if state == "01") < num_bytes:
        assert time.monotonic() < deadline, "the sender never filled the receiver's socket"


def listening_addresses(pid: int) -> list[str]:
    links = [link.readlink() for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    inodes = {str(link)[len("socket:[") : -1] for link in links if str(link).startswith("socket:[")}
    found = []
    for table in ("tcp", "tcp6"):
        sockets = loopback_sockets(table)
        found += [printable(local) for local, state, _, inode in sockets if state == "0A" and inode in inodes]
    return found


def printable(local: str) -> str:
    """The address of a /proc/net row: 32-bit words in host order."""
    words = bytes.fromhex(local.split(":")[0])
    packed = b"".join(struct.pack("=I", word) for (word,) in struct.iter_unpack(">I", words))
    return socket.inet_ntop(socket.AF_INET if len(packed) == 4 else socket.AF_INET6, packed)


def test_on_one_host_nothing_listens_outside_loopback(pair: Pair) -> None:
    for process in (pair.prefill, pair.decode):
        assert process.process.pid is not None
        addresses = listening_addresses(process.process.pid)
        assert addresses and set(addresses) <= {"127.0.0.1", "::1"}
