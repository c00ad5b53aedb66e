"""The dispatcher: brings every message from an engine, and every change in the fleet, to whom it concerns."""

from __future__ import annotations

import asyncio
import logging

from dynrt.planner.events import CacheEvents, CacheSnapshot
from dynrt.runtime.attempts import Attempts
from dynrt.runtime.config import RuntimeConfig
from dynrt.runtime.errors import MailboxFullError
from dynrt.runtime.fleet import Fleet
from dynrt.runtime.host import host_id
from dynrt.runtime.messages import (
    FromEngine,
    Goodbye,
    Heartbeat,
    Register,
    Status,
    StepReport,
    ToEngine,
)
from dynrt.runtime.metrics import Metrics
from dynrt.runtime.planning import (
    CacheSeen,
    PairDown,
    PairUp,
    PlannerActor,
    WorkerDown,
    WorkerUp,
)
from dynrt.runtime.supervisor import EngineSlot, Kill, Supervisor
from dynrt.runtime.transfer_manager import Gone, Said, TransferManager
from dynrt.runtime.worker import Worker
from dynrt.transfer.events import PeerConnected, Sent

log = logging.getLogger("dynrt.dispatcher")

SILENT_BEATS = 3  # heartbeats missed that make one worker likelier to hang than another


class Dispatcher:
    """Knows all parts of one runtime."""

    def __init__(
        self,
        config: RuntimeConfig,
        fleet: Fleet,
        planner: PlannerActor,
        supervisor: Supervisor,
        attempts: Attempts,
        metrics: Metrics,
        group: asyncio.TaskGroup,
    ) -> None:
        self._config = config
        self._fleet = fleet
        self._planner = planner
        self._supervisor = supervisor
        self._attempts = attempts
        self._metrics = metrics
        self._group = group
        self._watches: set[asyncio.Task[None]] = set()
        self._is_ending = False
        self._change = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._now = loop.time
        self._failure: asyncio.Future[None] = loop.create_future()
        self.transfers: TransferManager

    # --- messages from engines --------------------------------------------------------------------

    def on_message(self, incarnation: str, message: FromEngine) -> None:
        """Called on the event loop for each message, in order per engine. A failure here ends the runtime."""
        try:
            worker = self._fleet.get(incarnation)
            if isinstance(message, Register):
                self._register(message)
            elif worker is None:
                self._fleet.tell_unknown(incarnation)
            elif isinstance(message, StepReport):
                self._on_step(worker, message)
            else:
                self._on_worker_message(worker, message)
        except Exception as error:
            if not self._failure.done():
                self._failure.set_exception(error)

    async def surface_failures(self) -> None:
        """Raises what went wrong while a message was dealt with: no caller on the event loop would hear of it."""
        await self._failure

    def _on_worker_message(self, worker: Worker, message: FromEngine) -> None:
        match message:
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
            case Register() | StepReport():
                raise AssertionError("registrations and steps were dealt with before")
            case _:
                if isinstance(message, Sent):
                    self._attempts.pushed(worker.incarnation, message)
                self.transfers.tell(Said(worker.incarnation, message))

    def _said_goodbye(self, worker: Worker) -> None:
        log.info("engine says goodbye", extra={"worker": worker.id})
        if worker.process is None:  # else its end is seen, and that is the better news
            self._fleet.lost(worker.incarnation, "it left")

    def _on_step(self, worker: Worker, report: StepReport) -> None:
        new_preemptions = report.load.preemptions_total - worker.load.preemptions_total
        if new_preemptions:
            self._metrics.vllm_preemptions.inc(new_preemptions)
        worker.load = report.load
        worker.heard_at = self._now()
        self._metrics.vllm_generation_tokens.value += self._attempts.step(worker, report)
        if report.timing is not None:
            self._metrics.requests.step(report.timing.prefill_tokens + report.timing.decode_requests)
        if report.cache is not None:
            self._planner.tell(CacheSeen(worker.incarnation, report.cache))
        self._planner.step(worker.incarnation, report.load, report.timing)

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
        if self._is_ending:
            return  # it asks again, and the next runtime answers
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
        """Engines that joined outlive this runtime: nobody may wait for their end, and no more are taken."""
        self._is_ending = True
        for task in self._watches:
            task.cancel()

    # --- changes in the fleet ---------------------------------------------------------------------

    def worker_up(self, worker: Worker) -> None:
        self._planner.tell(WorkerUp(worker.register))
        self._metrics.workers.labels(worker.role).inc()
        self._announce_change()

    def worker_down(self, worker: Worker, reason: str) -> None:
        self._planner.tell(WorkerDown(worker.incarnation))
        self.transfers.tell(Gone(worker.incarnation))
        self._attempts.worker_lost(worker.incarnation, reason)
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
        metrics.open_requests.set(self._attempts.open_requests)
        metrics.open_handoffs.set(self.transfers.open_handoffs)
        metrics.oldest_handoff_s.set(self.transfers.oldest_handoff_s)
        metrics.quarantined_blocks.set(self.transfers.quarantined_blocks)
        self._planner.show_index()
        metrics.show_loads({worker.id: worker.load for worker in self._fleet})
        return metrics.text()

    def tell(self, incarnation: str, message: ToEngine) -> None:
        """To a worker that may just have gone: then its loss is on its way to everybody concerned."""
        worker = self._fleet.get(incarnation)
        if worker is None:
            return
        try:
            worker.tell(message)
        except MailboxFullError as error:
            self.kill(incarnation, str(error))  # a full outbox is a hang
