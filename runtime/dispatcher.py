"""The dispatcher: brings every message to whom it concerns, and every request to the workers of its plan."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from dynrt.planner.events import CacheEvents, CacheSnapshot
from dynrt.planner.plan import PlanRequest
from dynrt.runtime.attempt import Arrival, Attempt, AttemptError
from dynrt.runtime.config import RuntimeConfig
from dynrt.runtime.errors import DynrtError, EngineError, MailboxFullError
from dynrt.runtime.fleet import Fleet
from dynrt.runtime.host import host_id
from dynrt.runtime.messages import (
    Cancel,
    FromEngine,
    Goodbye,
    Heartbeat,
    Register,
    Status,
    StepReport,
    ToEngine,
    TokenDelta,
)
from dynrt.runtime.metrics import Metrics
from dynrt.runtime.planning import (
    CacheSeen,
    Exposed,
    FirstTokenSeen,
    PairDown,
    PairUp,
    PlannerActor,
    Pushed,
    RequestEnded,
    StepSeen,
    WorkerDown,
    WorkerUp,
)
from dynrt.runtime.request_life import RequestLife, Route
from dynrt.runtime.supervisor import EngineSlot, Kill, Supervisor
from dynrt.runtime.transfer_manager import Abandon, Gone, Open, Said, TransferManager
from dynrt.runtime.worker import Worker
from dynrt.transfer.events import PeerConnected, Sent
from dynrt.transfer.ledger import Decided

log = logging.getLogger("dynrt.dispatcher")

PLAN_TIMEOUT_S = 10.0
SILENT_BEATS = 3  # heartbeats missed that make one worker likelier to hang than another


class Dispatcher:
    """Knows all parts of one runtime; holds the open attempts."""

    def __init__(
        self,
        config: RuntimeConfig,
        fleet: Fleet,
        planner: PlannerActor,
        supervisor: Supervisor,
        metrics: Metrics,
        group: asyncio.TaskGroup,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._planner = planner
        self._supervisor = supervisor
        self._metrics = metrics
        self._group = group
        self._watches: set[asyncio.Task[None]] = set()
        self._attempts: dict[tuple[bytes, int], Attempt] = {}
        self._change = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.open_requests = 0
        self.transfers: TransferManager

    # --- messages from engines --------------------------------------------------------------------

    def on_message(self, incarnation: str, message: FromEngine) -> None:
        """Called on the event loop for each message, in order per engine. A failure here ends the runtime."""
        try:
            self._on_message(incarnation, message)
        except Exception as error:
            if not self._failure.done():
                self._failure.set_exception(error)

    async def surface_failures(self) -> None:
        """Raises what went wrong while a message was dealt with: no caller on the event loop would hear of it."""
        await self._failure

    def _on_message(self, incarnation: str, message: FromEngine) -> None:
        worker = self._fleet.get(incarnation)
        if isinstance(message, Register):
            self._register(message)
        elif worker is None:
            self._fleet.tell_unknown(incarnation)
        else:
            self._on_worker_message(worker, message)

    def _on_worker_message(self, worker: Worker, message: FromEngine) -> None:
        match message:
            case StepReport():
                self._on_step(worker, message)
            case Heartbeat():
                self._fleet.heard(worker, message, self._now())
            case Status():
                worker.answered(message)
            case PeerConnected():
                self._fleet.peer_connected(worker, message)
            case CacheEvents() | CacheSnapshot():
                self._planner.tell(CacheSeen(worker.incarnation, message))
            case Goodbye():
                self._said_goodbye(worker)
            case Register():
                raise AssertionError("registrations were dealt with before")
            case _:
                if isinstance(message, Sent):
                    self._on_sent(worker.incarnation, message)
                self.transfers.tell(Said(worker.incarnation, message))

    def _said_goodbye(self, worker: Worker) -> None:
        log.info("engine says goodbye", extra={"worker": worker.id})
        if worker.process is None:  # else its end is seen, and that is the better news
            self._fleet.lost(worker.incarnation, "it left")

    def _on_step(self, worker: Worker, report: StepReport) -> None:
        self._fleet.heard(worker, report, self._now())
        for delta in report.deltas:
            self._deliver(worker, delta, report)
        if report.cache is not None:
            self._planner.tell(CacheSeen(worker.incarnation, report.cache))
        self._planner.tell(StepSeen(worker.incarnation, report.load, report.timing))

    def _deliver(self, worker: Worker, delta: TokenDelta, report: StepReport) -> None:
        attempt = self._attempts.get((delta.key, delta.epoch))
        if attempt is None:
            return  # ended meanwhile
        if not attempt.has_begun:
            self._planner.tell(FirstTokenSeen(delta.key))
        arrival = Arrival(delta, worker.incarnation, report.timing)
        decodes_already = attempt.first_step is not None
        attempt.arrive(arrival)
        if not decodes_already:
            self._observe_decode_start(attempt)
        first = attempt.first_token(arrival)
        if first is not None:
            self.transfers.tell(first)
        self._metrics.vllm_generation_tokens.inc(len(delta.token_ids))

    def _register(self, register: Register) -> None:
        refusal = self._fleet.refusal(register)
        if refusal is not None:
            self._fleet.refuse(register, refusal)
            return
        slot = self._supervisor.slot_of(register.spawn_token)
        known = self._fleet.get(register.incarnation)
        if slot is not None:
            self._register_spawned(slot, register)
        elif known is not None:
            self._fleet.register(known.id, register, known.process, self._now())
        else:
            self._join(register)

    def _register_spawned(self, slot: EngineSlot, register: Register) -> None:
        if slot.process is None or slot.process.pid != register.pid:
            return  # the last words of a process whose end was seen before they were read
        slot.registered = slot.ever_registered = True
        self._fleet.register(slot.worker_id, register, slot.process, self._now())

    def _join(self, register: Register) -> None:
        """An engine that nobody here started. On this host its end is seen like that of our own."""
        worker_id = f"{register.role}-{register.incarnation[:8]}"
        on_this_host = register.host == host_id()
        process = self._supervisor.adopt(register.pid) if on_this_host else None
        if on_this_host and process is None:
            return  # it has ended since it wrote to us
        self._fleet.register(worker_id, register, process, self._now())
        if process is not None:
            watch = self._supervisor.watch(worker_id, process)
            task = self._group.create_task(watch, name=f"watch {worker_id}")
            self._watches.add(task)
            task.add_done_callback(self._watches.discard)

    def stop_watching(self) -> None:
        """Engines that joined outlive this runtime: nobody may wait for their end."""
        for task in self._watches:
            task.cancel()

    def _on_sent(self, prefill: str, sent: Sent) -> None:
        self._metrics.kv_bytes_pushed.inc(sent.kv_bytes)
        attempt = self._attempts.get(sent.id)
        if attempt is not None and sent.kv_bytes:
            self._planner.tell(Pushed(prefill, attempt.decode, sent.kv_bytes, sent.link_s))

    # --- changes in the fleet ---------------------------------------------------------------------

    def worker_up(self, worker: Worker) -> None:
        self._planner.tell(WorkerUp(worker.register))
        self._metrics.workers.labels(worker.role).inc()
        self._announce_change()

    def worker_down(self, worker: Worker, reason: str) -> None:
        self._planner.tell(WorkerDown(worker.incarnation))
        self.transfers.tell(Gone(worker.incarnation))
        for attempt in list(self._attempts.values()):
            attempt.worker_lost(worker.incarnation, reason)
        self._metrics.workers.labels(worker.role).dec()
        self._metrics.worker_losses.labels(worker.role).inc()
        self._announce_change()

    def pair_up(self, prefill: Worker, decode: Worker) -> None:
        self._planner.tell(PairUp(prefill.incarnation, decode.incarnation))
        self._announce_change()

    def pair_down(self, prefill: Worker, decode: Worker) -> None:
        self._planner.tell(PairDown(prefill.incarnation, decode.incarnation))
        self._announce_change()

    def engine_ended(self, worker_id: str, status: int) -> None:
        worker = self._fleet.by_id(worker_id)
        if worker is not None:
            self._fleet.lost(worker.incarnation, f"its process ended with status {status}")
        self._announce_change()

    async def watch_for_hangs(self) -> None:
        """Kill what lives but does not work; its end then does the rest."""
        while True:
            await asyncio.sleep(self._config.heartbeat_interval_s)
            limits = self._config.heartbeat_limit_s, self._config.step_limit_s
            for worker, reason in self._fleet.hung(self._now(), *limits):
                self.kill(worker.incarnation, reason)

    def kill(self, incarnation: str, reason: str) -> None:
        worker = self._fleet.get(incarnation)
        if worker is not None:
            self._supervisor.tell(Kill(worker.id, reason))

    def kill_suspect(self, suspects: tuple[str, ...], reason: str) -> None:
        """One of them keeps a handoff open: the one long silent if there is one, else the first."""
        silent_since = self._now() - SILENT_BEATS * self._config.heartbeat_interval_s
        workers = [worker for one in suspects if (worker := self._fleet.get(one)) is not None]
        silent = [worker for worker in workers if worker.heard_at < silent_since]
        for worker in sorted(silent, key=lambda worker: worker.heard_at)[:1] or workers[:1]:
            self.kill(worker.incarnation, reason)

    async def changed(self) -> None:
        """Until a worker or a pair comes or goes."""
        await self._change.wait()

    def _announce_change(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def metrics_text(self) -> bytes:
        """Counters as they stand, gauges of this moment."""
        metrics = self._metrics
        metrics.open_requests.set(self.open_requests)
        metrics.open_handoffs.set(self.transfers.open_handoffs)
        metrics.oldest_handoff_s.set(self.transfers.oldest_handoff_s)
        metrics.quarantined_blocks.set(self.transfers.quarantined_blocks)
        self._planner.show_index()
        metrics.show_loads({worker.id: worker.load for worker in self._fleet})
        return metrics.text()

    # --- for requests -----------------------------------------------------------------------------

    @contextmanager
    def account_for(self, life: RequestLife) -> Iterator[None]:
        """Count an open request, and how it ended; who has read the last output may well not ask for more."""
        outcome = "cancelled"
        self.open_requests += 1
        try:
            yield
        except Exception:
            outcome = "failed"
            raise
        finally:
            self.open_requests -= 1
            self._metrics.requests.labels("finished" if life.finished else outcome).inc()

    def output_passed(self, life: RequestLife) -> None:
        """The first of each request is its time to first token."""
        if not life.had_output:
            life.had_output = True
            self._metrics.ttft_s.observe(self._now() - life.began_at)

    async def plan(self, life: RequestLife, exclude: frozenset[str]) -> Route:
        request = PlanRequest(
            life.key,
            life.request.salt,
            life.known_ids,
            life.sampling.max_tokens,
            life.local_prefill,
            exclude,
            life.is_admitted,
        )
        try:
            plan = await self._planner.ask(request, PLAN_TIMEOUT_S)
        except BaseException:
            # Nobody waits for the plan any more, but it may have been made, or still be.
            self._planner.tell(RequestEnded(life.key, finished=False))
            raise
        return Route(plan.prefill, plan.decode)

    async def wait_for_change(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.changed()
        except TimeoutError:
            return  # the caller looks at the clock itself

    def tell(self, incarnation: str, message: ToEngine) -> None:
        """To a worker that may just have gone: then its loss is on its way to everybody concerned."""
        worker = self._fleet.get(incarnation)
        if worker is None:
            return
        try:
            worker.tell(message)
        except MailboxFullError as error:
            self.kill(incarnation, str(error))  # a full outbox is a hang

    def end_requests(self, error: DynrtError) -> None:
        """Whoever still reads a request learns that it will not go on."""
        for attempt in self._attempts.values():
            attempt.fail(error)

    def open_attempt(self, attempt: Attempt) -> None:
        self._attempts[attempt.id] = attempt
        if attempt.epoch > 0:
            self._metrics.retries.inc()
        if attempt.is_remote:
            self.transfers.tell(Open(attempt.key, attempt.epoch, attempt.prefill, attempt.decode))
        for incarnation in {attempt.prefill, attempt.decode}:
            if self._fleet.get(incarnation) is None:
                attempt.worker_lost(incarnation, "it went before the request reached it")
                self.transfers.tell(Gone(incarnation))  # again: the first time, this handoff was not open

    def close_attempt(self, attempt: Attempt, finished: bool, reason: str) -> None:
        del self._attempts[attempt.id]
        self._planner.tell(RequestEnded(attempt.key, finished))
        if not finished:
            for incarnation in {attempt.prefill, attempt.decode}:
                self.tell(incarnation, Cancel(attempt.key, attempt.epoch))
        if attempt.is_remote:
            self.transfers.tell(Abandon(attempt.key, attempt.epoch, "finished" if finished else reason))

    def on_decided(self, decided: Decided) -> None:
        """A handoff came to its outcome."""
        self._metrics.handoffs.labels(decided.outcome).inc()
        if decided.cause is not None:
            self._metrics.handoff_failures.labels(decided.cause).inc()
        attempt = self._attempts.get(decided.id)
        if attempt is None:
            return
        if decided.cause == "checksum":  # not tried again: whoever asked for checksums wants to know
            attempt.fail(EngineError(f"its KV arrived corrupted and was not used: {decided.reason}"))
        elif decided.outcome != "committed":
            attempt.fail(AttemptError(f"its handoff {decided.outcome}: {decided.reason}"))
        else:
            self._observe_exposed(attempt, decided)

    def _observe_exposed(self, attempt: Attempt, decided: Decided) -> None:
        """Only where both ends read the same clock."""
        prefill = self._fleet.get(attempt.prefill)
        sampled_at, received_at = attempt.first_token_at, decided.received_at
        if (
            prefill is None
            or prefill.register.host != decided.host
            or sampled_at is None
            or received_at is None
        ):
            return
        exposed_s = max(0.0, received_at - sampled_at)
        self._metrics.handoff_exposed_s.observe(exposed_s)
        self._planner.tell(Exposed(exposed_s))
        attempt.received_at = received_at
        self._observe_decode_start(attempt)

    def _observe_decode_start(self, attempt: Attempt) -> None:
        """Where the time between prefill's token and decode's own went, once both its ends are known."""
        sampled_at, received_at, step = attempt.first_token_at, attempt.received_at, attempt.first_step
        if sampled_at is None or received_at is None or step is None:
            return
        began_at = step.ended_at - step.duration_s
        self._metrics.decode_wait_s.observe(max(0.0, began_at - max(sampled_at, received_at)))
        self._metrics.decode_first_step_s.observe(step.duration_s)
        self._metrics.first_decode_s.observe(step.ended_at - sampled_at)

    def prompt_seen(self, num_tokens: int, cached_tokens: int) -> None:
        metrics = self._metrics
        metrics.prefill_tokens.labels("computed").inc(num_tokens - cached_tokens)
        metrics.prefill_tokens.labels("cached").inc(cached_tokens)
        metrics.vllm_prompt_tokens.inc(num_tokens)
        metrics.vllm_cache_queries.inc(num_tokens)
        metrics.vllm_cache_hits.inc(cached_tokens)

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
