"""The planner as an actor: errors instead of no plan, snapshots for gaps, and nothing counted for what is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from random import Random

import pytest
from registrations import registration

from dynrt.planner.admission import AdmissionLimits
from dynrt.planner.coefficients import StepTimes
from dynrt.planner.events import ROOT, BlocksStored, CacheEvents, CacheSnapshot
from dynrt.planner.load import LoadReport
from dynrt.planner.plan import NoPlan, Plan, PlanRequest
from dynrt.planner.planner import Planner
from dynrt.runtime.errors import ContextLengthError, NoWorkerError, OverloadedError
from dynrt.runtime.messages import EngineLoad, SnapshotRequest, pack_ids
from dynrt.runtime.metrics import Metrics
from dynrt.runtime.planning import (
    STEPS_AT_ONCE,
    CacheSeen,
    Exposed,
    FirstTokenSeen,
    PairUp,
    PlannerActor,
    PlannerMessage,
    RequestEnded,
    WorkerDown,
    WorkerUp,
)
from dynrt.runtime.requests import LocalPrefill
from dynrt.runtime.snapshot_asks import INTERVAL_S
from dynrt.runtime.virtual_time import run_virtually

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
def metrics() -> Metrics:
    return Metrics("tiny")


@pytest.fixture
async def planner(asked: Asked, metrics: Metrics) -> AsyncIterator[PlannerActor]:
    async with running(PlannerActor(Planner(Random(0)), asked, metrics)) as actor:
        yield actor


@asynccontextmanager
async def running(actor: PlannerActor) -> AsyncIterator[PlannerActor]:
    task = asyncio.create_task(actor.run())
    yield actor
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def request(num_tokens: int = 40, key: bytes = KEY, local_prefill: LocalPrefill = "auto") -> PlanRequest:
    return PlanRequest(key, "", pack_ids(range(num_tokens)), 10, local_prefill)


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
    with pytest.raises(ContextLengthError, match=r"the prompt has 600 tokens .* takes 512"):
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


async def test_every_engine_that_comes_is_asked_for_a_snapshot(planner: PlannerActor, asked: Asked) -> None:
    """One that outlived another runtime is full of KV, and says nothing while it is idle."""
    up(planner)
    planner.tell(CacheSeen("p", CacheSnapshot(1000, [BlocksStored(ROOT, [500], BLOCK)])))
    plan = await planner.ask(request(local_prefill="never"), 5.0)
    assert asked.snapshots == [("p", SnapshotRequest()), ("d", SnapshotRequest())]
    assert plan.prefill_hit_tokens == 16 and planner.incomplete_workers == 0


def test_gap_in_cache_events_asks_for_a_snapshot() -> None:
    async def main() -> None:
        asked = Asked()
        async with running(PlannerActor(Planner(Random(0)), asked, Metrics("tiny"))) as planner:
            stored = BlocksStored(ROOT, [1], BLOCK)
            up(planner)
            await asyncio.sleep(INTERVAL_S)
            asked.snapshots.clear()
            planner.tell(CacheSeen("p", CacheEvents(5, [stored])))
            planner.tell(CacheSeen("gone", CacheEvents(5, [stored])))
            await planner.ask(request(), 5.0)
            assert asked.snapshots == [("p", SnapshotRequest())]
            assert planner.incomplete_workers == 1
            planner.tell(CacheSeen("p", CacheSnapshot(6, [stored])))
            plan = await planner.ask(request(local_prefill="never"), 5.0)
            assert planner.incomplete_workers == 0
            assert plan.prefill_hit_tokens == 16

    run_virtually(main())


async def test_the_index_shows_what_it_dropped(asked: Asked, metrics: Metrics) -> None:
    actor = PlannerActor(Planner(Random(0), index_bytes=2000), asked, metrics)
    async with running(actor) as planner:
        up(planner)
        for number in range(20):
            token_ids = pack_ids([number] * 16)
            planner.tell(CacheSeen("p", CacheEvents(number, [BlocksStored(ROOT, [number + 1], token_ids)])))
        await planner.ask(request(), 5.0)
        planner.show_index()
        planner.show_index()
        dropped = metrics.registry.get_sample_value("dynrt_index_dropped_blocks_total")
        num_bytes = metrics.registry.get_sample_value("dynrt_index_bytes")
    assert dropped is not None and 10 <= dropped < 20
    assert num_bytes is not None and 1000 < num_bytes <= 2000


@pytest.mark.parametrize(
    ("limits", "reason", "message"),
    [
        (AdmissionLimits(max_ttft_s=1e-3), "too_slow", r"expected after 0.0 s at best, and 0.001 s is the"),
        (AdmissionLimits(max_waiting_requests=1), "queues_full", "1 requests or more wait on every worker"),
    ],
)
async def test_a_request_that_would_wait_for_too_long_is_refused(
    asked: Asked, metrics: Metrics, limits: AdmissionLimits, reason: str, message: str
) -> None:
    async with running(PlannerActor(Planner(Random(0), limits=limits), asked, metrics)) as planner:
        up(planner)
        with pytest.raises(OverloadedError, match=message) as refusal:
            for number in range(3):
                await planner.ask(request(key=bytes([number]) * 16), 5.0)
        assert refusal.value.status == 503 and refusal.value.retry_after_s >= 1
    made = metrics.registry.get_sample_value("dynrt_plan_reasons_total", {"reason": "expected sooner"})
    refused = metrics.registry.get_sample_value("dynrt_plan_refusals_total", {"reason": reason})
    assert (made or 0, refused) == ({"too_slow": 0, "queues_full": 2}[reason], 1)


async def test_a_plan_at_rest_is_made_at_once_and_behind_news_in_turn(planner: PlannerActor) -> None:
    up(planner)
    assert (await planner.plan(request(), 5.0)).decode == "d", "what was told before counts"
    assert planner.is_at_rest
    with pytest.raises(StopIteration) as ended:
        planner.plan(request(), 5.0).send(None)
    assert ended.value.value.decode == "d"


async def test_a_defect_in_a_plan_at_rest_ends_the_planner(asked: Asked, metrics: Metrics) -> None:
    actor = PlannerActor(Planner(Random(0)), asked, metrics)
    task = asyncio.create_task(actor.run())
    with pytest.raises(NoWorkerError):
        await actor.ask(request(), 5.0)
    assert actor.is_at_rest
    with pytest.raises(AssertionError):
        await actor.plan(request(num_tokens=0), 5.0)
    with pytest.raises(AssertionError):
        await asyncio.wait_for(task, 5.0)


async def test_a_defect_in_what_is_told_at_rest_ends_the_planner_and_not_who_told_it(
    asked: Asked, metrics: Metrics
) -> None:
    actor = PlannerActor(Planner(Random(0)), asked, metrics)
    task = asyncio.create_task(actor.run())
    up(actor)
    await actor.plan(request(), 5.0)
    assert actor.is_at_rest
    for _ in range(STEPS_AT_ONCE):
        assert not task.done()
        actor.step("p", None, None)  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        await asyncio.wait_for(task, 5.0)


class Recorder(Planner):
    """Writes down in which order it is told of steps and of what depends on them."""

    def __init__(self) -> None:
        super().__init__(Random(0))
        self.told: list[str] = []

    def step(self, worker_id: str, load: LoadReport, timing: StepTimes | None) -> None:
        self.told.append(f"step of {worker_id}")
        super().step(worker_id, load, timing)

    def plan(self, request: PlanRequest, now: float) -> Plan | NoPlan:
        self.told.append("plan")
        return super().plan(request, now)

    def first_token(self, key: bytes) -> None:
        self.told.append("first token")
        super().first_token(key)

    def finished(self, key: bytes) -> None:
        self.told.append("finished")
        super().finished(key)

    def exposed(self, exposed_s: float) -> None:
        self.told.append("exposed")
        super().exposed(exposed_s)


async def test_steps_are_noted_before_whatever_comes_after_them(asked: Asked, metrics: Metrics) -> None:
    recorder = Recorder()
    async with running(PlannerActor(recorder, asked, metrics)) as actor:
        up(actor)
        await actor.plan(request(), 5.0)
        assert actor.is_at_rest
        for _ in range(STEPS_AT_ONCE - 1):
            actor.step("p", EngineLoad(), None)
        assert recorder.told == ["plan"], "nobody has asked"
        actor.first_token(KEY)
        actor.step("d", EngineLoad(), None)
        actor.ended(KEY, finished=True)
        actor.step("p", EngineLoad(), None)
        await actor.plan(request(), 5.0)
        actor.step("d", EngineLoad(), None)
        actor.tell(Exposed(0.1))
        actor.step("p", EngineLoad(), None)
        await actor.plan(request(key=b"other" + bytes(11)), 5.0)
    steps = ["step of p"] * (STEPS_AT_ONCE - 1)
    ended = ["first token", "step of d", "finished", "step of p", "plan"]
    assert recorder.told == ["plan", *steps, *ended, "step of d", "exposed", "step of p", "plan"]
