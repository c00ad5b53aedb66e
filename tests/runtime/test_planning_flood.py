"""The planner keeps nobody from the event loop, whatever comes at it.

Time is the loop thread's CPU time. What a busy machine adds to that, as others take its caches away, it adds to the
planner's own plans as well: these are the measure of what a turn may take.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from random import Random
from statistics import median

from registrations import registration

from dynrt.planner.events import ROOT, BlocksRemoved, BlocksStored, CacheEvents, CacheSnapshot
from dynrt.planner.plan import PlanRequest
from dynrt.planner.planner import Planner
from dynrt.runtime.actor import TURN_S
from dynrt.runtime.loop import freeze_start
from dynrt.runtime.messages import SnapshotRequest
from dynrt.runtime.metrics import Metrics
from dynrt.runtime.planning import CacheSeen, PairUp, PlannerActor, PlannerMessage, WorkerUp
from dynrt.transfer.layout import KvGeometry

PLANS = 8  # a turn may take their time beyond its end: for the message that is under way, for garbage
ATTEMPTS = 4
EVENTS_A_SECOND = 50_000
FLOOD_S = 0.5
BURST = 1000  # events that come at once
SIZE = 16
BLOCKS = 16  # an event
NUM_PREFILL = NUM_DECODE = 32
CONTEXT = 40_000
PROMPT_TOKENS = 32_768
GEOMETRY = KvGeometry(2, 4096, SIZE, num_kv_heads=1, head_size=4, dtype="float32")


class LongestTurn:
    """The most CPU time that passed in the loop's thread between two turns of one task, less what is left out."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self._left_out_s = 0.0

    async def watch(self) -> None:
        while True:
            began = time.thread_time() - self._left_out_s
            await asyncio.sleep(0)
            self.cpu_s = max(self.cpu_s, time.thread_time() - self._left_out_s - began)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """The test's own work."""
        began = time.thread_time()
        yield
        self._left_out_s += time.thread_time() - began


async def plan_cpu_s(actor: PlannerActor, random: Random) -> float:
    """What a plan costs here and now, on a planner that has nothing else to do."""
    costs_s = []
    for number in range(5):
        request = request_of(number.to_bytes(16, "little"), random)
        began = time.thread_time()
        await actor.ask(request, 60.0)
        costs_s.append(time.thread_time() - began)
    return median(costs_s)


def request_of(key: bytes, random: Random) -> PlanRequest:
    return PlanRequest(key, "", random.randbytes(PROMPT_TOKENS * 4), 10)


@asynccontextmanager
async def watched(actor: PlannerActor) -> AsyncIterator[LongestTurn]:
    longest = LongestTurn()
    tasks = [asyncio.create_task(longest.watch()), asyncio.create_task(actor.run())]
    await asyncio.sleep(0)
    yield longest
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@contextmanager
def frozen() -> Iterator[None]:
    """Garbage is looked for as in a runtime that is up; the test's own objects, its flood too, are none of it."""
    thresholds = gc.get_threshold()
    freeze_start()
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def ask_nobody(incarnation: str, wanted: SnapshotRequest) -> None:
    """Every engine here is fresh."""


def new_fleet() -> PlannerActor:
    actor = PlannerActor(Planner(Random(0)), ask_nobody, Metrics("tiny"))
    prefills = [f"p{number}" for number in range(NUM_PREFILL)]
    decodes = [f"d{number}" for number in range(NUM_DECODE)]
    for name in prefills:
        actor.tell(WorkerUp(registration(name, "prefill", context_length=CONTEXT, geometry=[GEOMETRY])))
    for name in decodes:
        actor.tell(WorkerUp(registration(name, "decode", context_length=CONTEXT, geometry=[GEOMETRY])))
    for prefill in prefills:
        for decode in decodes:
            actor.tell(PairUp(prefill, decode))
    return actor


def flood(random: Random, num_events: int) -> list[PlannerMessage]:
    """Prompts of 256 blocks stored on all workers in turn, 16 blocks an event; every fourth is removed again."""
    messages: list[PlannerMessage] = []
    next_seq: dict[str, int] = {}
    while len(messages) < num_events:
        for name in (f"p{number}" for number in range(NUM_PREFILL)):
            seq = next_seq.get(name, 0)
            first_key, parent_key = seq * BLOCKS + 1, ROOT
            events: list[BlocksStored | BlocksRemoved] = []
            for _ in range(3):
                keys = list(range(first_key, first_key + BLOCKS))
                events.append(BlocksStored(parent_key, keys, random.randbytes(BLOCKS * SIZE * 4)))
                first_key, parent_key = first_key + BLOCKS, keys[-1]
            events.append(BlocksRemoved(list(range(parent_key, parent_key - BLOCKS, -1))))
            messages += [CacheSeen(name, CacheEvents(seq + at, [event])) for at, event in enumerate(events)]
            next_seq[name] = seq + len(events)
    return messages


async def test_a_flood_of_events_with_plans_between() -> None:
    # A turn that was interrupted for long is dearer than it was to be: not in each of these.
    assert min([await _turn_in_flood(seed) for seed in range(ATTEMPTS)]) < 1.0


async def _turn_in_flood(seed: int) -> float:
    """The longest turn, as a share of what it may be."""
    random = Random(seed)
    messages = flood(random, int(EVENTS_A_SECOND * FLOOD_S))
    actor = new_fleet()
    plans: list[asyncio.Task[object]] = []
    with frozen():
        async with watched(actor) as longest:
            for first in range(0, len(messages), BURST):
                with longest.left_out():
                    for message in messages[first : first + BURST]:
                        actor.tell(message)
                    request = request_of(first.to_bytes(16, "big"), random)
                plans.append(asyncio.create_task(actor.ask(request, 60.0)))
                await asyncio.sleep(BURST / EVENTS_A_SECOND)
            await asyncio.gather(*plans)
            turn_s = longest.cpu_s
            allowed_s = TURN_S + PLANS * await plan_cpu_s(actor, random)
    assert len(plans) > 10
    assert actor.incomplete_workers == 0
    return turn_s / allowed_s


async def test_a_large_snapshot() -> None:
    assert min([await _turn_with_snapshot(seed) for seed in range(ATTEMPTS)]) < 1.0


async def _turn_with_snapshot(seed: int) -> float:
    random = Random(seed)
    stored = [
        BlocksStored(ROOT, list(range(first, first + BLOCKS)), random.randbytes(BLOCKS * SIZE * 4))
        for first in range(1, 100_000, BLOCKS)
    ]
    known = stored[-1].token_ids
    actor = new_fleet()
    with frozen():
        async with watched(actor) as longest:
            actor.tell(CacheSeen("p0", CacheSnapshot(1000, stored)))
            request = PlanRequest(bytes(16), "", known + random.randbytes(4), 10, "never")
            plan = await actor.ask(request, 60.0)
            turn_s = longest.cpu_s
            allowed_s = TURN_S + PLANS * await plan_cpu_s(actor, random)
    assert plan.prefill_hit_tokens == BLOCKS * SIZE
    return turn_s / allowed_s
