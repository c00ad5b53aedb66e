"""The parts of one runtime: its actors and what stands between them, made, introduced to each other, run and ended."""

from __future__ import annotations

import asyncio
import logging

from dynrt.engines.models.resolve import ModelDir
from dynrt.planner.planner import Planner
from dynrt.runtime.attempts import Attempts
from dynrt.runtime.channel import Channel
from dynrt.runtime.config import RuntimeConfig
from dynrt.runtime.dispatcher import Dispatcher
from dynrt.runtime.engine_slots import engine_slots
from dynrt.runtime.errors import ConfigError, OverloadedError
from dynrt.runtime.fleet import Fleet
from dynrt.runtime.messages import Shutdown, Status
from dynrt.runtime.metrics import Metrics
from dynrt.runtime.planning import PlannerActor
from dynrt.runtime.request_life import LEASE_S
from dynrt.runtime.spawner import Spawner
from dynrt.runtime.supervisor import Supervisor
from dynrt.runtime.transfer_manager import TransferManager
from dynrt.transfer.ledger import HandoffLedger, LedgerLimits

log = logging.getLogger("dynrt.runtime")

STATUS_TIMEOUT_S = 10.0
# A reservation may queue behind a full decode worker for as long as its client is ready to wait.
_LEDGER_LIMITS = LedgerLimits(reserve_answer_s=600.0, settle_s=5.0, lease_s=LEASE_S, max_open=8192)


class Parts:
    """Tasks run in `group`, and what ends one of them ends the group."""

    def __init__(
        self,
        runtime_id: str,
        config: RuntimeConfig,
        model: ModelDir,
        channel: Channel,
        spawner: Spawner,
        planner: Planner,
        group: asyncio.TaskGroup,
    ) -> None:
        self._runtime_id = runtime_id
        self._config = config
        self._channel = channel
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []
        self.metrics = Metrics(model.name)
        self.fleet = Fleet(runtime_id, model.name, config.heartbeat_interval_s, channel)
        self.planner = PlannerActor(
            planner, lambda incarnation, wanted: self.dispatcher.tell(incarnation, wanted), self.metrics
        )
        self.supervisor = Supervisor(
            engine_slots(config, model),
            spawner,
            lambda worker_id, status: self.dispatcher.engine_ended(worker_id, status),
        )
        self.attempts = Attempts(
            self.fleet,
            self.planner,
            self.metrics,
            lambda incarnation, message: self.dispatcher.tell(incarnation, message),
            lambda: self.dispatcher.changed(),
        )
        self.dispatcher = Dispatcher(
            config, self.fleet, self.planner, self.supervisor, self.attempts, self.metrics, group
        )
        self.transfers = TransferManager(
            HandoffLedger(_LEDGER_LIMITS),
            self.dispatcher.tell,
            self.dispatcher.kill_suspect,
            self.attempts.on_decided,
        )
        self.attempts.transfers = self.dispatcher.transfers = self.transfers
        self.fleet.observer = self.dispatcher

    # --- life -------------------------------------------------------------------------------------

    def start(self) -> None:
        """Listen, and start the engines."""
        self._channel.open(self.dispatcher.on_message)
        address = self._channel.address
        log.info("engines join here", extra={"runtime": self._runtime_id, "address": address})
        create_task = self._group.create_task
        self._tasks = [
            create_task(self.planner.run(), name="planner"),
            create_task(self.transfers.run(), name="transfer manager"),
            create_task(self.supervisor.run(), name="supervisor"),
            create_task(self.dispatcher.surface_failures(), name="messages"),
            create_task(self.dispatcher.watch_for_hangs(), name="hang watch"),
            create_task(self.supervisor.keep(address), name="engines"),
        ]

    async def complete(self) -> None:
        """Until every configured engine has registered, and every pair that can hand off is connected.

        Raises ConfigError if that takes too long.
        """
        limit_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while self.supervisor.missing():
                    await self.dispatcher.changed()
                self.fleet.check_partners()
                while list(self.fleet.pairs_to_connect()):
                    await self.dispatcher.changed()
        except TimeoutError:
            missing = ", ".join(self.supervisor.missing()) or "a connection between engines"
            raise ConfigError(f"not ready after {limit_s:g} s: {missing} is missing") from None

    async def engine_joined(self) -> None:
        """Until there is an engine: at once, unless all of them join by themselves. Raises ConfigError."""
        limit_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while not len(self.fleet):
                    await self.dispatcher.changed()
        except TimeoutError:
            raise ConfigError(
                f"no engine has joined {self._channel.address} within {limit_s:g} s; "
                "start one with `dynrt engine --join`"
            ) from None

    def stop(self) -> None:
        """End requests, our own engines and all tasks; `group` is there to await these."""
        for worker in self.fleet:
            if self.supervisor.slot_of(worker.register.spawn_token) is not None:
                self.dispatcher.tell(worker.incarnation, Shutdown())  # one that joined outlives us
        self.attempts.end_requests(OverloadedError("the runtime has ended; send the request elsewhere"))
        self.dispatcher.stop_watching()
        self.transfers.stop()
        for task in self._tasks:
            task.cancel()

    # --- their state ------------------------------------------------------------------------------

    async def status(self) -> dict[str, Status]:
        """The inside of every engine, by worker id."""
        workers = list(self.fleet)
        answers = await asyncio.gather(*(worker.ask(STATUS_TIMEOUT_S) for worker in workers))
        return {worker.id: answer for worker, answer in zip(workers, answers, strict=True)}

    def idle(self) -> bool:
        """Nothing is open, on the way or waiting in a mailbox."""
        mailboxes = self.planner.mailbox_size + self.transfers.mailbox_size + self.supervisor.mailbox_size
        waiting = mailboxes + self._channel.backlog() + self.transfers.open_handoffs
        return waiting + self.attempts.open_requests == 0 and self.planner.is_idle()
