"""Ranks in processes of their own: handoffs by real NIXL agents between them, byte by byte, and what ends with whom."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random

import pytest
from layout_rig import HEADS_FIRST, NATIVE, NUM_LAYERS, KvMemory, PromptMaker, Values, check, worker
from layout_wires import (
    HEAD_VALUES,
    MOST_HEADS,
    TOKENS,
    TwoThreads,
    hand_off,
    make_arena,
    make_memory,
)
from rank_process import RankProcesses, map_arena

from dynrt.runtime.errors import RankLostError
from dynrt.transfer.faults import Fault
from dynrt.transfer.local import BlocksReady
from dynrt.transfer.memory import RankMemory
from dynrt.transfer.ranks.messages import FromRank, Hello, LayerDone, Polled, PollOnce, ToRank
from dynrt.transfer.ranks.rank_socket import RankSocket
from dynrt.transfer.ranks.remote import RemoteRank, StepLayer
from dynrt.transfer.ucx import ucx_environment

DEADLINE_S = 30.0
NUM_HEADS, BLOCK_SIZE = 2, 16
MOST_TOKENS = 200
ARENA_SHAPE = NUM_LAYERS, TOKENS * MOST_HEADS * HEAD_VALUES


@pytest.fixture(scope="module", autouse=True)
def loopback_only() -> Iterator[None]:
    """Before NIXL is imported, here and in the processes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ucx_environment(one_host=True).items():
            patch.setenv(name, value)
        yield


def await_condition(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1e-3)


class Rig:
    """Files that hold the memory of ranks, and the processes started over them."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._num_arenas = 0
        self._started: list[RankProcesses] = []

    def arenas(self, num_ranks: int) -> tuple[list[Path], list[Values]]:
        self._num_arenas += 1
        paths = [self._directory / f"{self._num_arenas}-{rank}" for rank in range(num_ranks)]
        for path in paths:
            with open(path, "wb") as file:
                file.truncate(ARENA_SHAPE[0] * ARENA_SHAPE[1] * 2)
        return paths, [map_arena(path, ARENA_SHAPE) for path in paths]

    def start(self, memory: KvMemory, paths: Sequence[Path]) -> RankProcesses:
        self._started.append(RankProcesses(memory.geometry, paths))
        return self._started[-1]

    def close(self) -> None:
        for processes in self._started:
            processes.kill()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


class RankThreads(TwoThreads):
    """The prefill worker's ranks are processes: their model tells each layer there, and not all at once."""

    def __init__(
        self,
        source: KvMemory,
        target: KvMemory,
        source_ranks: RankProcesses | None,
        target_ranks: RankProcesses | None,
        **how: bool | tuple[Fault, ...],
    ) -> None:
        remote: list[Sequence[RankMemory] | None] = [
            None if ranks is None else ranks.remote for ranks in (source_ranks, target_ranks)
        ]
        super().__init__(source, target, source_ranks=remote[0], target_ranks=remote[1], **how)  # type: ignore[arg-type]
        self._source_ranks = source_ranks
        self._num_steps = 0

    def step_begins(self, ready: list[BlocksReady]) -> None:
        super().step_begins(ready)
        if self._source_ranks is None:
            return
        self._num_steps += 1
        for layer in range(NUM_LAYERS):
            event = StepLayer(self._source_ranks.remote, self._num_steps, layer)
            self.prefill.layer_written(layer, event)

    def layer_written(self, layer: int) -> None:
        if self._source_ranks is None:
            super().layer_written(layer)
            return
        for rank in range(len(self._source_ranks.processes)):
            self.turn()
            self._source_ranks.layer_written(rank, self._num_steps, layer)


@pytest.mark.parametrize(
    ("num_ranks", "are_processes", "order", "verify"),
    [
        ((2, 2), (True, True), NATIVE, True),
        ((2, 1), (True, False), HEADS_FIRST, False),
        ((1, 2), (False, True), HEADS_FIRST, True),
    ],
    ids=["2 to 2, verified", "2 to 1", "1 to 2, verified"],
)
def test_handoffs(
    rig: Rig, num_ranks: tuple[int, int], are_processes: tuple[bool, bool], order: str, verify: bool
) -> None:
    (source_paths, source_arenas), (target_paths, target_arenas) = (
        rig.arenas(count) if is_process else ([], make_arena())
        for count, is_process in zip(num_ranks, are_processes, strict=True)
    )
    arenas, sizes = [source_arenas, target_arenas], (BLOCK_SIZE, BLOCK_SIZE)
    source, target = make_memory(arenas, num_ranks, sizes, NUM_HEADS, order)
    source_ranks = rig.start(source, source_paths) if source_paths else None
    target_ranks = rig.start(target, target_paths) if target_paths else None
    before, maker = target.copy(), PromptMaker(source, target, seed=1)
    prompts = [maker.make(MOST_TOKENS) for _ in range(12)]
    wire = RankThreads(source, target, source_ranks, target_ranks, verify=verify)
    hand_off(wire, source, prompts, Random(1))
    wire.close()
    for ranks in (source_ranks, target_ranks):
        if ranks is not None:
            ranks.stop()
    check(target, before, prompts, BLOCK_SIZE)


# --- what ends with whom --------------------------------------------------------------------------


def test_a_rank_that_dies_ends_the_transfer_thread(rig: Rig) -> None:
    paths, arena = rig.arenas(2)
    source, target = make_memory([arena, make_arena()], (2, 1), (BLOCK_SIZE, BLOCK_SIZE), NUM_HEADS, NATIVE)
    ranks = rig.start(source, paths)
    wire = RankThreads(source, target, ranks, None)
    ranks.processes[1].kill()
    with pytest.raises(AssertionError, match="the process at the other end is gone"):
        await_condition(lambda: wire.turn() is not None)
    wire.decode.stop(5.0)


def start_ranks_and_wait(paths: Sequence[Path], pipe: Connection) -> None:
    """An engine process, as far as its ranks can tell."""
    ranks = RankProcesses(worker(2, NUM_HEADS, BLOCK_SIZE, NATIVE, TOKENS // BLOCK_SIZE), paths)
    pipe.send([process.pid for process in ranks.processes])
    pipe.recv()


@pytest.mark.parametrize("is_stopped", [False, True], ids=["running", "stopped"])
def test_ranks_die_with_their_engine(rig: Rig, is_stopped: bool) -> None:
    paths, _ = rig.arenas(2)
    pipe, childs_end = multiprocessing.Pipe()
    engine = multiprocessing.get_context("spawn").Process(
        target=start_ranks_and_wait, args=(paths, childs_end)
    )
    engine.start()
    assert pipe.poll(DEADLINE_S)
    files = [os.pidfd_open(pid) for pid in pipe.recv()]
    for file in files:
        if is_stopped:
            signal.pidfd_send_signal(file, signal.SIGSTOP)
    engine.kill()
    engine.join()
    for file in files:
        assert select.select([file], [], [], DEADLINE_S)[0], "a rank lives on"
        os.close(file)


# --- the transfer thread's side alone -------------------------------------------------------------


class FakeRank:
    """The other end of a RemoteRank's socket."""

    def __init__(self, rank: int = 0) -> None:
        ours, theirs = socket.socketpair()
        self.socket: RankSocket[ToRank] = RankSocket(ours, ToRank)
        (geometry,) = worker(1, NUM_HEADS, BLOCK_SIZE, NATIVE, 4)
        self.socket.send([Hello(rank, os.getpid(), geometry, None)])
        self.remote = RemoteRank(RankSocket[FromRank](theirs, FromRank), DEADLINE_S)

    def close(self) -> None:
        self.socket.close()
        self.remote.let_go()


@pytest.fixture
def fakes() -> Iterator[list[FakeRank]]:
    fakes = [FakeRank(0), FakeRank(1)]
    yield fakes
    for fake in fakes:
        fake.close()


def test_a_layer_is_written_when_all_ranks_have_said_so(fakes: list[FakeRank]) -> None:
    events = [StepLayer([fake.remote for fake in fakes], step, layer) for step in (1, 2) for layer in (0, 1)]
    assert not any(event.query() for event in events)
    fakes[0].socket.send([LayerDone(1, 0), LayerDone(1, 1)])
    fakes[1].socket.send([LayerDone(1, 0)])
    assert [event.query() for event in events] == [True, False, False, False]
    fakes[1].socket.send([LayerDone(1, 1)])
    fakes[1].socket.send([LayerDone(2, 0)])
    assert [event.query() for event in events] == [True, True, False, False]


def test_a_poll_counts_once_the_rank_has_made_it(fakes: list[FakeRank]) -> None:
    rank = fakes[0]
    for _ in range(3):
        assert rank.remote.poll_notifications() == []
    assert rank.remote.num_polls == 0
    assert rank.socket.receive() == [PollOnce()], "asked once"
    rank.socket.send([Polled()])
    rank.remote.poll_notifications()
    assert rank.remote.num_polls == 1


def test_a_rank_that_is_gone_or_hangs(fakes: list[FakeRank], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynrt.transfer.ranks.rank_socket.SEND_LIMIT_S", 0.05)
    rank = fakes[0]
    with pytest.raises(RankLostError, match="nothing was read"):
        while True:
            rank.remote.remove_peer("a peer" * 1000)
    rank.socket.close()
    with pytest.raises(RankLostError, match="gone"):
        rank.remote.read()


@pytest.mark.parametrize("chunk_bytes", [1, 7, 4096])
def test_frames_arrive_whole_however_they_are_cut(chunk_bytes: int) -> None:
    messages = [[LayerDone(step, layer) for layer in range(step % 5)] for step in range(50)]
    received: list[FromRank] = []
    sender, wire = socket.socketpair()
    feed, receiver = socket.socketpair()
    with sender, wire, feed, receiver:
        for batch in messages:
            RankSocket[FromRank](sender, FromRank).send(batch)
        sent = wire.recv(1 << 20)
        incoming = RankSocket[FromRank](receiver, FromRank)
        for begin in range(0, len(sent), chunk_bytes):
            feed.sendall(sent[begin : begin + chunk_bytes])
            received += incoming.receive()
    assert received == [message for batch in messages for message in batch]
