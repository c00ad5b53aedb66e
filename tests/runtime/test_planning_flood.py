"""The planner keeps nobody from the event loop, whatever comes at it: after a turn's worth of work others have theirs.

Work is counted, not timed. Each operation of the planner's is taken to last WORK_S, and the loop's clock goes on by
that much; what passes beside it makes turns shorter.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager, suppress
from random import Random

import pytest
from registrations import registration

from dynrt.planner.events import ROOT, BlocksRemoved, BlocksStored, CacheEvents, CacheSnapshot
from dynrt.planner.plan import NoPlan, Plan, PlanRequest
from dynrt.planner.planner import Planner
from dynrt.runtime.actor import TURN_S
from dynrt.runtime.messages import SnapshotRequest
from dynrt.runtime.metrics import Metrics
from dynrt.runtime.planning import CacheSeen, PairUp, PlannerActor, PlannerMessage, WorkerUp
from dynrt.transfer.layout import KvGeometry

WORK_S = TURN_S / 10
MOST_WORK = 10 + 1  # in a turn: when it is over, one operation more may be under way
NUM_EVENTS = 25_000
BURST = 1000  # events that come at once
SIZE = 16
BLOCKS = 16  # an event
NUM_PREFILL = NUM_DECODE = 32
CONTEXT = 40_000
PROMPT_TOKENS = 32_768
DEADLINE_S = 600.0
GEOMETRY = KvGeometry(2, 4096, SIZE, num_kv_heads=1, head_size=4, dtype="float32")


class WorkClock:
    """The clock of the running loop, which work makes go faster, and how much was done between two turns of a task."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._real_time = loop.time
        self._total = self._before = self.most = 0
        monkeypatch.setattr(loop, "time", lambda: self._real_time() + self._total * WORK_S)

    def work(self) -> None:
        self._total += 1

    async def watch(self) -> None:
        while True:
            self._before = self._total
            await asyncio.sleep(0)
            self.most = max(self.most, self._total - self._before)


class CountedPlanner(Planner):
    """Counts plans, messages about caches, and the parts in which a snapshot is taken in."""

    def __init__(self, clock: WorkClock) -> None:
        super().__init__(Random(0))
        self._clock = clock

    def plan(self, request: PlanRequest, now: float) -> Plan | NoPlan:
        self._clock.work()
        return super().plan(request, now)

    def cache_events(self, worker_id: str, run: CacheEvents) -> bool:
        self._clock.work()
        return super().cache_events(worker_id, run)

    def cache_snapshot(self, worker_id: str, snapshot: CacheSnapshot) -> Generator[None, None, bool]:
        parts = super().cache_snapshot(worker_id, snapshot)
        while True:
            self._clock.work()
            try:
                next(parts)
            except StopIteration as end:
                return bool(end.value)
            yield


def request_of(key: bytes, random: Random) -> PlanRequest:
    return PlanRequest(key, "", random.randbytes(PROMPT_TOKENS * 4), 10)


@pytest.fixture
async def clock(monkeypatch: pytest.MonkeyPatch) -> WorkClock:
    return WorkClock(monkeypatch)


@asynccontextmanager
async def running(actor: PlannerActor, clock: WorkClock) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(clock.watch()), asyncio.create_task(actor.run())]
    await asyncio.sleep(0)
    yield
    for task in tasks:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def ask_nobody(incarnation: str, wanted: SnapshotRequest) -> None:
    """Every engine here is fresh."""


def new_fleet(clock: WorkClock) -> PlannerActor:
    actor = PlannerActor(CountedPlanner(clock), ask_nobody, Metrics("tiny"))
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


async def test_a_flood_of_events_with_plans_between(clock: WorkClock) -> None:
    random = Random(0)
    messages = flood(random, NUM_EVENTS)
    actor = new_fleet(clock)
    plans: list[asyncio.Task[object]] = []
    async with running(actor, clock):
        for first in range(0, len(messages), BURST):
            for message in messages[first : first + BURST]:
                actor.tell(message)
            request = request_of(first.to_bytes(16, "big"), random)
            plans.append(asyncio.create_task(actor.ask(request, DEADLINE_S)))
            for _ in range(BURST // 5):  # turns for all of them, if each does what it may
                await asyncio.sleep(0)
        await asyncio.gather(*plans)
    assert len(plans) > 10
    assert actor.incomplete_workers == 0
    assert 1 < clock.most <= MOST_WORK


async def test_a_large_snapshot(clock: WorkClock) -> None:
    random = Random(0)
    stored = [
        BlocksStored(ROOT, list(range(first, first + BLOCKS)), random.randbytes(BLOCKS * SIZE * 4))
        for first in range(1, 100_000, BLOCKS)
    ]
    actor = new_fleet(clock)
    async with running(actor, clock):
        actor.tell(CacheSeen("p0", CacheSnapshot(1000, stored)))
        request = PlanRequest(bytes(16), "", stored[-1].token_ids + random.randbytes(4), 10, "never")
        plan = await actor.ask(request, DEADLINE_S)
    assert plan.prefill_hit_tokens == BLOCKS * SIZE
    assert 1 < clock.most <= MOST_WORK
