"""Handoffs between workers of other layouts, by real NIXL agents, several a side, on host memory: byte by byte."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import product
from random import Random

import pytest
from layout_rig import HEADS_FIRST, NATIVE, KvMemory, PromptMaker, Values, check, worker
from layout_wires import TOKENS, TwoThreads, Wire, compute, hand_off, make_arena, make_memory

from dynrt.transfer import notifications
from dynrt.transfer.agent import Agent
from dynrt.transfer.connections import Connections
from dynrt.transfer.decode_end import DecodeEnd
from dynrt.transfer.effects import Order, Tell
from dynrt.transfer.ends import Effects, EndEvent, HandoffEnds
from dynrt.transfer.events import ConnectPeer, Drained, Sent
from dynrt.transfer.faults import Fault
from dynrt.transfer.layout import KvRegion
from dynrt.transfer.local import BlocksReady, PrefillOpened
from dynrt.transfer.mapping import KvMapping
from dynrt.transfer.prefill_end import PrefillEnd
from dynrt.transfer.pusher import Pusher
from dynrt.transfer.ucx import ucx_environment

BLOCK_SIZES = (16, 32, 64)
MOST_TOKENS = 200
PROMPTS_AT_ONCE = 64


@pytest.fixture(scope="module", autouse=True)
def loopback_only() -> Iterator[None]:
    """Before NIXL is imported, which no module of this file does by itself."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ucx_environment(one_host=True).items():
            patch.setenv(name, value)
        yield


# --- every combination, both ends in one thread ---------------------------------------------------


class Side:
    """Memory and agents that all layouts of one side share, since an agent takes a while to make."""

    def __init__(self, name: str) -> None:
        from dynrt.transfer.nixl_agent import NixlAgent

        self.arena = make_arena()
        shape = worker(1, 1, 16, NATIVE, 1)[0]
        self.agents: list[Agent] = [
            NixlAgent(f"{name}-{os.getpid()}:{rank}", rank, shape, _regions(memory))
            for rank, memory in enumerate(self.arena)
        ]

    def introduce(self, incarnation: str, memory: KvMemory, *, will_push: bool) -> ConnectPeer:
        agents = self.agents[: len(memory.geometry)]
        metadata, addresses = [a.metadata for a in agents], [a.region_addresses for a in agents]
        return ConnectPeer(incarnation, metadata, addresses, list(memory.geometry), will_push)


def _regions(memory: Values) -> list[KvRegion]:
    return [KvRegion(layer.ctypes.data, layer.nbytes) for layer in memory]


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[Side, Side]]:
    both = Side("prefill"), Side("decode")
    yield both
    for side in both:
        for agent in side.agents:
            agent.close()


class OneThread(Wire):
    """Does what two transfer threads do, in turns."""

    def __init__(self, sides: tuple[Side, Side], source: KvMemory, target: KvMemory) -> None:
        super().__init__()
        agents = sides[0].agents[: len(source.geometry)]
        self._receivers = sides[1].agents[: len(target.geometry)]
        self._prefill, self._decode = (
            HandoffEnds(PrefillEnd(memory.geometry), DecodeEnd(memory.geometry, "here"))
            for memory in (source, target)
        )
        self._pusher = Pusher(self._prefill.prefill, agents, None, None)
        self._connections = Connections(agents)
        self._decode.introduce(sides[0].introduce("prefill", source, will_push=False))
        introduction = sides[1].introduce("decode", target, will_push=True)
        mapping = self._prefill.introduce(introduction)
        assert isinstance(mapping, KvMapping), mapping
        self._connections.connect(introduction, mapping)

    def tell_prefill(self, event: EndEvent) -> None:
        self._do(self._prefill.on_event(event, time.monotonic()))

    def tell_decode(self, event: EndEvent) -> None:
        self._do(self._decode.on_event(event, time.monotonic()))

    def step_begins(self, ready: list[BlocksReady]) -> None:
        self._do(self._prefill.prefill.step_begins(ready, time.monotonic()))

    def layer_written(self, layer: int) -> None:
        self._do(self._prefill.prefill.layer_written(layer, time.monotonic()))

    def turn(self) -> None:
        self._do(self._pusher.post_next() or [])
        self._do(self._pusher.poll())
        for agent in self._receivers:
            for packed in agent.poll_notifications():
                self._do(self._decode.decode.notified(notifications.decode(packed), time.monotonic()))

    def _do(self, effects: Effects) -> None:
        for effect in effects:
            assert isinstance(effect, Tell | Order), effect
            if isinstance(effect, Tell):
                self.heard(effect.message)

    def close(self) -> None:
        self._connections.leave("decode")


@pytest.mark.parametrize("order", [NATIVE, HEADS_FIRST], ids=["tokens first", "heads first"])
@pytest.mark.parametrize("num_heads", [2, 3], ids=["2 heads", "3 heads"])
@pytest.mark.parametrize(
    "num_ranks", list(product((1, 2, 4), repeat=2)), ids=lambda ranks: f"{ranks[0]} to {ranks[1]} ranks"
)
def test_every_rank_receives_its_heads_whatever_the_block_sizes(
    sides: tuple[Side, Side], num_ranks: tuple[int, int], num_heads: int, order: str
) -> None:
    for seed, sizes in enumerate(product(BLOCK_SIZES, repeat=2)):
        source, target = make_memory([side.arena for side in sides], num_ranks, sizes, num_heads, order)
        before, maker = target.copy(), PromptMaker(source, target, seed)
        prompts = [maker.make(MOST_TOKENS) for _ in range(3)]
        wire = OneThread(sides, source, target)
        hand_off(wire, source, prompts, Random(seed))
        wire.close()
        check(target, before, prompts, min(sizes))


# --- real transfer threads ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ranks", "num_heads", "sizes", "order", "verify"),
    [
        ((4, 1), 2, (16, 64), NATIVE, False),
        ((1, 4), 2, (64, 16), HEADS_FIRST, True),
        ((2, 4), 3, (32, 32), NATIVE, True),
        ((4, 2), 3, (64, 32), HEADS_FIRST, False),
    ],
    ids=["4 to 1", "1 to 4, verified", "2 to 4, verified", "4 to 2"],
)
def test_64_handoffs_at_once(
    num_ranks: tuple[int, int], num_heads: int, sizes: tuple[int, int], order: str, verify: bool
) -> None:
    source, target = make_memory([make_arena(), make_arena()], num_ranks, sizes, num_heads, order)
    before, maker = target.copy(), PromptMaker(source, target, seed=1)
    prompts = [maker.make(TOKENS // PROMPTS_AT_ONCE - max(sizes) // 2) for _ in range(PROMPTS_AT_ONCE)]
    wire = TwoThreads(source, target, verify)
    hand_off(wire, source, prompts, Random(1))
    wire.close()
    check(target, before, prompts, min(sizes))


def test_bytes_that_were_not_sent_are_found_in_a_mapped_layout_too() -> None:
    source, target = make_memory([make_arena(), make_arena()], (1, 2), (64, 16), 2, NATIVE)
    (prompt,) = [PromptMaker(source, target, seed=1).make(MOST_TOKENS)]
    wire = TwoThreads(source, target, verify=True, faults=(Fault("corrupt", first=1, limit=1),))
    wire.tell_prefill(PrefillOpened(*prompt.id))
    wire.reserve(prompt)
    for _ in compute(wire, source, [prompt], Random(1)):
        wire.turn()
    wire.expect(Drained, 1)
    wire.expect(Sent, 1)
    wire.close()
    (drained,) = wire.drained
    assert drained.cause == "checksum" and drained.reason.startswith("rank ")
