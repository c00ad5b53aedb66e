"""The planner as an actor: what it is told of the fleet, and the plans it is asked for."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

import msgspec

from dynrt.planner.events import CacheEvents, CacheSnapshot
from dynrt.planner.plan import NoPlan, Plan, PlanRequest, WorkerFacts
from dynrt.planner.planner import Planner
from dynrt.runtime.actor import TURN_S, Actor
from dynrt.runtime.errors import ContextLengthError, DynrtError, NoWorkerError, OverloadedError
from dynrt.runtime.messages import EngineLoad, Register, SnapshotRequest, StepTiming
from dynrt.runtime.metrics import Metrics
from dynrt.runtime.snapshot_asks import SnapshotAsks

log = logging.getLogger("dynrt.planner")

RETRY_AFTER_S = 2
STEPS_AT_ONCE = 16  # that may wait: the code that notes them is cold at each, and warm for all but the first


class WorkerUp(msgspec.Struct, frozen=True):
    register: Register


class WorkerDown(msgspec.Struct, frozen=True):
    incarnation: str


class PairUp(msgspec.Struct, frozen=True):
    prefill: str
    decode: str


class PairDown(msgspec.Struct, frozen=True):
    prefill: str
    decode: str


class CacheSeen(msgspec.Struct, frozen=True):
    incarnation: str
    news: CacheEvents | CacheSnapshot


class StepSeen(msgspec.Struct, frozen=True):
    incarnation: str
    load: EngineLoad
    timing: StepTiming | None


class Pushed(msgspec.Struct, frozen=True):
    """A handoff moved so many bytes while the link was busy for so long."""

    prefill: str
    decode: str
    kv_bytes: int
    link_s: float


class Exposed(msgspec.Struct, frozen=True):
    """A handoff was exposed for so long."""

    exposed_s: float


class FirstTokenSeen(msgspec.Struct, frozen=True):
    key: bytes


class RequestEnded(msgspec.Struct, frozen=True):
    key: bytes
    finished: bool


PlannerMessage = (
    PlanRequest
    | WorkerUp
    | WorkerDown
    | PairUp
    | PairDown
    | CacheSeen
    | StepSeen
    | Pushed
    | Exposed
    | FirstTokenSeen
    | RequestEnded
)


class PlannerActor(Actor[PlannerMessage]):
    """Asked a PlanRequest it answers with a Plan, or refuses with NoWorkerError, OverloadedError or ContextLengthError.

    Workers are known to it by incarnation: nothing learned of one outlives it. What every request and every step
    needs has a method of its own, heard at once while the actor is at rest: nearly always, and much cheaper. Steps
    are noted, in their turn, once something else is asked or told.
    """

    def __init__(
        self, planner: Planner, ask_snapshot: Callable[[str, SnapshotRequest], None], metrics: Metrics
    ) -> None:
        super().__init__("planner")
        self._planner = planner
        self._snapshots = SnapshotAsks(ask_snapshot)
        self._metrics = metrics
        self._workers: set[str] = set()
        self._steps: list[tuple[str, EngineLoad, StepTiming | None]] = []  # that nobody has asked about yet

    @property
    def incomplete_workers(self) -> int:
        return len(self._planner.incomplete_workers)

    def show_index(self) -> None:
        """Set the metrics of the prefix index."""
        planner = self._planner
        self._metrics.index_incomplete.set(self.incomplete_workers)
        self._metrics.show_index(planner.index_bytes, planner.dropped_blocks)

    def is_idle(self) -> bool:
        """No load is counted anywhere."""
        self._note_steps()
        loads = [self._planner.load(incarnation) for incarnation in self._workers]
        return not any(load.prefill_requests or load.decode_requests for load in loads)

    def step(self, incarnation: str, load: EngineLoad, timing: StepTiming | None) -> None:
        """A worker's step is done; `timing` is None if it computed nothing."""
        if not self.is_at_rest:
            self.tell(StepSeen(incarnation, load, timing))
            return
        self._steps.append((incarnation, load, timing))
        if len(self._steps) < STEPS_AT_ONCE:
            return
        try:
            self._note_steps()
        except Exception as fault:
            self.fail(fault)

    def first_token(self, key: bytes) -> None:
        """The request's prefill is done."""
        if not self.is_at_rest:
            self.tell(FirstTokenSeen(key))
            return
        try:
            self._note_steps()
            self._planner.first_token(key)
        except Exception as fault:
            self.fail(fault)

    def ended(self, key: bytes, *, finished: bool) -> None:
        """The request is over. Not finished: what its plan promised to the index did not come about."""
        if not self.is_at_rest:
            self.tell(RequestEnded(key, finished))
            return
        try:
            self._note_steps()
            if finished:
                self._planner.finished(key)
            else:
                self._planner.failed(key)
        except Exception as fault:
            self.fail(fault)

    async def plan(self, request: PlanRequest, timeout_s: float) -> Plan:
        """As `ask`, but at once where nothing comes before it."""
        if not self.is_at_rest:
            answer: Plan = await self.ask(request, timeout_s)
            return answer
        try:
            self._note_steps()
            return self._plan(request)
        except DynrtError:
            raise
        except Exception as fault:
            self.fail(fault)
            raise

    async def receive(self, message: PlannerMessage) -> Plan | None:
        self._note_steps()
        if isinstance(message, PlanRequest):
            return self._plan(message)
        if isinstance(message, CacheSeen):
            await self._note_cache(message.incarnation, message.news)
        else:
            self._note(message)
        return None

    def _note_steps(self) -> None:
        """Those that came before what is asked or told now."""
        steps, self._steps = self._steps, []
        for incarnation, load, timing in steps:
            self._planner.step(incarnation, load, timing)

    def _note(self, message: PlannerMessage) -> None:
        planner = self._planner
        match message:
            case StepSeen(incarnation, load, timing):
                planner.step(incarnation, load, timing)
            case FirstTokenSeen(key):
                planner.first_token(key)
            case RequestEnded(key, finished=True):
                planner.finished(key)
            case RequestEnded(key):
                planner.failed(key)
            case WorkerUp(register):
                self._worker_up(register)
            case WorkerDown(incarnation):
                self._workers.discard(incarnation)
                self._snapshots.forget(incarnation)
                planner.worker_left(incarnation)
            case PairUp(prefill, decode):
                planner.pair_connected(prefill, decode)
            case PairDown(prefill, decode):
                planner.pair_disconnected(prefill, decode)
            case Pushed(prefill, decode, kv_bytes, link_s):
                planner.pushed(prefill, decode, kv_bytes, link_s)
            case Exposed(exposed_s):
                planner.exposed(exposed_s)

    def _worker_up(self, register: Register) -> None:
        """An engine that joined may be full of KV of which nobody here has heard, and idle ones tell nothing."""
        self._workers.add(register.incarnation)
        self._planner.worker_joined(_facts(register))
        self._snapshots.want(register.incarnation)

    async def _note_cache(self, incarnation: str, news: CacheEvents | CacheSnapshot) -> None:
        if incarnation not in self._workers:
            return
        if isinstance(news, CacheEvents):
            is_gapless = self._planner.cache_events(incarnation, news)
        else:
            is_gapless = await self._restore(incarnation, news)
        if not is_gapless:
            log.warning("cache events missing, asking for a snapshot", extra={"incarnation": incarnation})
            self._snapshots.want(incarnation)

    async def _restore(self, incarnation: str, snapshot: CacheSnapshot) -> bool:
        """In turns with the rest of the loop; the mailbox waits."""
        loop = asyncio.get_running_loop()
        turn_ends_at = loop.time() + TURN_S
        steps = self._planner.cache_snapshot(incarnation, snapshot)
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return bool(end.value)
            if loop.time() >= turn_ends_at:
                await asyncio.sleep(0)
                turn_ends_at = loop.time() + TURN_S

    def _plan(self, request: PlanRequest) -> Plan:
        plan = self._planner.plan(request, asyncio.get_running_loop().time())
        if isinstance(plan, NoPlan):
            self._metrics.plan_refusals.labels(plan.kind).inc()
            raise _refused(plan)
        self._metrics.plans.labels(plan.kind).inc()
        self._metrics.plan_reasons.labels(plan.reason).inc()
        if log.isEnabledFor(logging.DEBUG):  # to explain it takes as long as to make it
            log.debug("planned", extra={"request": request.key.hex(), "plan": plan.explain()})
        return plan


def _refused(no_plan: NoPlan) -> ContextLengthError | OverloadedError:
    match no_plan.kind:
        case "too_long":
            return ContextLengthError(no_plan.reason, param="max_tokens")
        case "no_worker":
            return NoWorkerError(f"{no_plan.reason}; try again in a moment", retry_after_s=RETRY_AFTER_S)
        case "too_slow" | "queues_full" | "no_room":
            retry_after_s = max(1, math.ceil(no_plan.retry_after_s))
            return OverloadedError(
                f"{no_plan.reason}; try again in {retry_after_s} s", retry_after_s=retry_after_s
            )


def _facts(register: Register) -> WorkerFacts:
    geometry = register.geometry[0]
    layer_block_bytes = sum(rank.layer_block_bytes for rank in register.geometry)
    return WorkerFacts(
        id=register.incarnation,
        role=register.role,
        block_size=geometry.block_size,
        context_length=register.context_length,
        kv_bytes_per_token=geometry.num_layers * layer_block_bytes // geometry.block_size,
        num_layers=geometry.num_layers,
        num_blocks=geometry.num_blocks,
    )
