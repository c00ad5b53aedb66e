"""The planner as an actor: errors instead of no plan, snapshots for gaps, and nothing counted for what is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from random import Random

import pytest
from registrations import registration

from dynrt.planner.events import ROOT, BlocksStored, CacheEvents, CacheSnapshot
from dynrt.planner.plan import PlanRequest
from dynrt.planner.planner import Planner
from dynrt.runtime.errors import ContextLengthError, NoWorkerError
from dynrt.runtime.messages import SnapshotRequest, pack_ids
from dynrt.runtime.planning import (
    CacheSeen,
    FirstTokenSeen,
    PairUp,
    PlannerActor,
    PlannerMessage,
    RequestEnded,
    WorkerDown,
    WorkerUp,
)

KEY = bytes(16)
BLOCK = pack_ids(range(16))


class Asked:
    """Snapshots that the planner asked for."""

    def __init__(self) -> None:
        self.snapshots: list[tuple[str, SnapshotRequest]] = []

    def __call__(self, incarnation: str, wanted: SnapshotRequest) -> None:
        self.snapshots.append((incarnation, wanted))


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
async def planner(asked: Asked) -> AsyncIterator[PlannerActor]:
    actor = PlannerActor(Planner(Random(0)), asked)
    task = asyncio.create_task(actor.run())
    yield actor
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def request(num_tokens: int = 40, key: bytes = KEY) -> PlanRequest:
    return PlanRequest(key, "", pack_ids(range(num_tokens)), 10)


def up(planner: PlannerActor, *messages: PlannerMessage) -> None:
    for message in (
        WorkerUp(registration("p", "prefill")),
        WorkerUp(registration("d", "decode")),
        PairUp("p", "d"),
        *messages,
    ):
        planner.tell(message)


async def test_nobody_is_up(planner: PlannerActor) -> None:
    with pytest.raises(NoWorkerError, match="no worker is up; try again in a moment") as refusal:
        await planner.ask(request(), 5.0)
    assert refusal.value.retry_after_s >= 1


async def test_prompt_that_fits_nowhere(planner: PlannerActor) -> None:
    up(planner)
    with pytest.raises(ContextLengthError, match="600 tokens fits no worker; the longest that does has 511"):
        await planner.ask(request(600), 5.0)


async def test_load_is_counted_until_the_request_is_over(planner: PlannerActor) -> None:
    up(planner)
    plan = await planner.ask(request(), 5.0)
    assert {plan.prefill, plan.decode} <= {"p", "d"}
    assert not planner.is_idle()
    planner.tell(FirstTokenSeen(KEY))
    planner.tell(RequestEnded(KEY, finished=True))
    await planner.ask(request(key=b"other" + bytes(11)), 5.0)
    planner.tell(RequestEnded(b"other" + bytes(11), finished=False))
    with pytest.raises(ContextLengthError):
        await planner.ask(request(600), 5.0)  # everything before was handled
    assert planner.is_idle()


async def test_worker_that_left_is_not_planned_on(planner: PlannerActor) -> None:
    up(planner, WorkerDown("p"))
    plan = await planner.ask(request(), 5.0)
    assert (plan.kind, plan.decode) == ("local", "d")


async def test_gap_in_cache_events_asks_for_a_snapshot(planner: PlannerActor, asked: Asked) -> None:
    stored = BlocksStored(ROOT, [1], BLOCK)
    up(planner, CacheSeen("p", CacheEvents(5, [stored])), CacheSeen("gone", CacheEvents(5, [stored])))
    await planner.ask(request(), 5.0)
    assert asked.snapshots == [("p", SnapshotRequest())]
    assert planner.incomplete_workers == 1
    planner.tell(CacheSeen("p", CacheSnapshot(6, [stored])))
    plan = await planner.ask(request(), 5.0)
    assert planner.incomplete_workers == 0
    assert plan.prefill_hit_tokens == 16
