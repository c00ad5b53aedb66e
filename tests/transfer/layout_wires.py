"""A prefill and a decode worker over memory of any layout, connected: for tests over NIXL."""

from __future__ import annotations

import os
import queue
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import numpy as np
from layout_rig import NUM_LAYERS, KvMemory, Prompt, Values, worker

from dynrt.transfer.ends import EndEvent
from dynrt.transfer.events import (
    Arm,
    Committed,
    ConnectPeer,
    Drained,
    FirstToken,
    PeerConnected,
    Reserved,
    Sent,
)
from dynrt.transfer.faults import Fault
from dynrt.transfer.local import BlocksReady, PrefillOpened, ReservationMade
from dynrt.transfer.memory import RankMemory
from dynrt.transfer.options import TransferOptions

DEADLINE_S = 30.0
TOKENS = 64 * 64  # that each rank has room for
MOST_RANKS, MOST_HEADS, HEAD_VALUES = 4, 3, 2 * 4


class Wire(ABC):
    """A prefill and a decode worker that are connected."""

    def __init__(self) -> None:
        self.said: Counter[type] = Counter()
        self.drained: list[Drained] = []

    @abstractmethod
    def tell_prefill(self, event: EndEvent) -> None: ...

    @abstractmethod
    def tell_decode(self, event: EndEvent) -> None: ...

    @abstractmethod
    def step_begins(self, ready: list[BlocksReady]) -> None: ...

    @abstractmethod
    def layer_written(self, layer: int) -> None: ...

    @abstractmethod
    def turn(self) -> None:
        """Let things happen."""

    def heard(self, message: object) -> None:
        """What a runtime hears; it tells the prefill end its target."""
        self.said[type(message)] += 1
        if isinstance(message, Reserved):
            target = message.first_block, message.block_ids, message.num_tokens
            self.tell_prefill(Arm(*message.id, "decode", *target))
        if isinstance(message, Drained):
            self.drained.append(message)

    def reserve(self, prompt: Prompt) -> None:
        made = "prefill", prompt.target_hit, prompt.reserved, DEADLINE_S, prompt.num_tokens
        self.tell_decode(ReservationMade(*prompt.id, *made))
        self.tell_decode(FirstToken(*prompt.id, token_id=7, chars_emitted=1))

    def expect(self, kind: type, count: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while self.said[kind] < count:
            assert time.monotonic() < deadline, (
                f"no {count} {kind.__name__}, only {self.said}, {self.drained}"
            )
            self.turn()


def hand_off(wire: Wire, source: KvMemory, prompts: Sequence[Prompt], rng: Random) -> None:
    """All of them at once; each is reserved for at some time before, during or after its prefill."""
    unreserved = list(prompts)
    for prompt in prompts:
        wire.tell_prefill(PrefillOpened(*prompt.id))
    while rng.random() < 0.5 and unreserved:
        wire.reserve(unreserved.pop())
    for _ in compute(wire, source, prompts, rng):
        if unreserved and rng.random() < 0.5:
            wire.reserve(unreserved.pop())
        wire.turn()
    for prompt in unreserved:
        wire.reserve(prompt)
    wire.expect(Committed, len(prompts))
    wire.expect(Sent, len(prompts))


def compute(wire: Wire, source: KvMemory, prompts: Sequence[Prompt], rng: Random) -> Iterator[None]:
    """The steps of an engine: each prompt's hit, then chunks of whole blocks, several prompts in a batch."""
    done = {prompt.id: 0 for prompt in prompts}
    while waiting := [prompt for prompt in prompts if done[prompt.id] < len(prompt.source_ids)]:
        ready, chunks = [], []
        for prompt in waiting[: rng.randint(1, 3)]:
            begin = done[prompt.id]
            if begin == 0 and prompt.source_hit:
                begin = prompt.source_hit
                put_blocks(source, prompt, range(NUM_LAYERS), 0, begin)
                ready.append(prompt.ready(0, begin, written=True))
            end = done[prompt.id] = rng.randint(begin + 1, len(prompt.source_ids))
            ready.append(prompt.ready(begin, end, written=False))
            chunks.append((prompt, begin, end))
        wire.step_begins(ready)
        for layer in range(NUM_LAYERS):
            for prompt, begin, end in chunks:
                put_blocks(source, prompt, [layer], begin, end)
            wire.layer_written(layer)
            yield


def put_blocks(source: KvMemory, prompt: Prompt, layers: Sequence[int], begin: int, end: int) -> None:
    size = source.geometry[0].block_size
    for layer in layers:
        source.put(prompt, prompt.source_ids, layer, begin * size, min(end * size, prompt.num_tokens))


def make_memory(
    arenas: Sequence[Sequence[Values]], num_ranks: Sequence[int], sizes: Sequence[int], heads: int, order: str
) -> tuple[KvMemory, KvMemory]:
    """Of a prefill and a decode worker."""
    noise = np.random.default_rng(0)
    source, target = (
        KvMemory(worker(count, heads, size, order, TOKENS // size), arena, noise)
        for arena, count, size in zip(arenas, num_ranks, sizes, strict=True)
    )
    return source, target


def make_arena() -> list[Values]:
    return [np.zeros((NUM_LAYERS, TOKENS * MOST_HEADS * HEAD_VALUES), np.uint16) for _ in range(MOST_RANKS)]


class TwoThreads(Wire):
    """Transfer threads as in engine processes, one agent for each of their ranks: here, or in the processes given."""

    def __init__(
        self,
        source: KvMemory,
        target: KvMemory,
        verify: bool = False,
        faults: tuple[Fault, ...] = (),
        source_ranks: Sequence[RankMemory] | None = None,
        target_ranks: Sequence[RankMemory] | None = None,
    ) -> None:
        from dynrt.transfer.thread import TransferThread

        super().__init__()
        self._told: queue.Queue[Any] = queue.Queue()

        def make(
            name: str, memory: KvMemory, ranks: Sequence[RankMemory] | None, options: TransferOptions
        ) -> TransferThread:
            incarnation = f"{name}-{os.getpid()}-{id(self)}"
            tell = self._told.put
            return TransferThread(
                incarnation,
                list(memory.geometry),
                memory.regions() if ranks is None else ranks,
                "here",
                tell,
                lambda _order: None,
                tell,
                options,
            )

        self.prefill = make("prefill", source, source_ranks, TransferOptions(verify=verify, faults=faults))
        self.decode = make("decode", target, target_ranks, TransferOptions(verify=verify))
        for thread in (self.prefill, self.decode):
            thread.start()
        self.decode.post(ConnectPeer("prefill", [], [], list(source.geometry), will_push=False))
        metadata, addresses = self.decode.agent_metadata, self.decode.region_addresses
        self.prefill.post(ConnectPeer("decode", metadata, addresses, list(target.geometry), will_push=True))
        self.expect(PeerConnected, 1)

    def tell_prefill(self, event: EndEvent) -> None:
        self.prefill.post(event)

    def tell_decode(self, event: EndEvent) -> None:
        self.decode.post(event)

    def step_begins(self, ready: list[BlocksReady]) -> None:
        self.prefill.step_begins(ready)

    def layer_written(self, layer: int) -> None:
        self.prefill.layer_written(layer, None)

    def turn(self) -> None:
        try:
            message = self._told.get(timeout=0.01)
        except queue.Empty:
            return
        assert not isinstance(message, BaseException), message
        assert not isinstance(message, PeerConnected) or message.error is None, message
        self.heard(message)

    def close(self) -> None:
        """Both; nothing may be open."""
        assert self.prefill.open_handoffs == self.decode.open_handoffs == 0
        for thread in (self.prefill, self.decode):
            thread.stop(5.0)
