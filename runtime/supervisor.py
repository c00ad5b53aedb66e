"""The supervisor: keeps the configured engine processes running, and ends those that hang."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from dynrt.engines.config import EngineConfig
from dynrt.runtime.actor import Actor
from dynrt.runtime.errors import ConfigError
from dynrt.runtime.restart import RestartPolicy
from dynrt.runtime.spawner import Process, Spawner

log = logging.getLogger("dynrt.supervisor")

STOP_GRACE_S = 3.0


class Kill(msgspec.Struct, frozen=True):
    """End this worker's process now; its end is then seen like any other."""

    worker_id: str
    reason: str


class EngineSlot:
    """One configured engine, whatever process fills it at the moment."""

    def __init__(self, worker_id: str, config: EngineConfig, spawn_token: str) -> None:
        self.worker_id = worker_id
        self.config = config
        self.spawn_token = spawn_token
        self.process: Process | None = None
        self.registered = False  # the present process has
        self.ever_registered = False
        self.given_up = False


class Supervisor(Actor[Kill]):
    """Restart policy: RestartPolicy per slot; an engine that never registered is a fault of the configuration."""

    def __init__(
        self, slots: list[EngineSlot], spawner: Spawner, on_exit: Callable[[str, int], None]
    ) -> None:
        super().__init__("supervisor")
        self._slots = {slot.worker_id: slot for slot in slots}
        self._by_token = {slot.spawn_token: slot for slot in slots}
        self._adopted: dict[str, Process] = {}
        self._spawner = spawner
        self._on_exit = on_exit

    def slot_of(self, spawn_token: str) -> EngineSlot | None:
        return self._by_token.get(spawn_token)

    def missing(self) -> list[str]:
        """Slots whose engine has not registered yet."""
        return [slot.worker_id for slot in self._slots.values() if not slot.registered and not slot.given_up]

    async def keep(self, address: str) -> None:
        """Start every slot's engine and restart it when it ends, until cancelled; then end them all."""
        try:
            async with asyncio.TaskGroup() as group:
                for slot in self._slots.values():
                    group.create_task(self._keep_slot(slot, address), name=f"keep {slot.worker_id}")
        finally:
            await self._end_all()

    def adopt(self, pid: int) -> Process | None:
        """An engine of this host that was started by somebody else; None if it has ended already."""
        try:
            return self._spawner.adopt(pid)
        except ProcessLookupError:
            return None

    async def watch(self, worker_id: str, process: Process) -> None:
        """Until that adopted engine has ended; cancelled, it lets it run."""
        self._adopted[worker_id] = process
        try:
            status = await process.exited()
        finally:
            del self._adopted[worker_id]
            process.release()
        self._on_exit(worker_id, status)

    async def receive(self, message: Kill) -> None:
        process = self._process_of(message.worker_id)
        if process is not None:
            log.warning("killing engine", extra={"worker": message.worker_id, "reason": message.reason})
            process.kill()

    def _process_of(self, worker_id: str) -> Process | None:
        slot = self._slots.get(worker_id)
        return slot.process if slot is not None else self._adopted.get(worker_id)

    async def _keep_slot(self, slot: EngineSlot, address: str) -> None:
        policy = RestartPolicy()
        loop = asyncio.get_running_loop()
        while True:
            slot.process = self._spawner.spawn(slot.config, address, slot.spawn_token)
            log.info("engine started", extra={"worker": slot.worker_id, "pid": slot.process.pid})
            status = await slot.process.exited()
            slot.process, slot.registered = None, False
            log.warning("engine ended", extra={"worker": slot.worker_id, "status": status})
            self._on_exit(slot.worker_id, status)
            if not slot.ever_registered:
                raise ConfigError(
                    f"engine {slot.worker_id} ended with status {status} before it was ready; it says why above"
                )
            pause_s = policy.crashed(loop.time())
            if pause_s is None:
                slot.given_up = True
                log.error("engine ends again and again, giving it up", extra={"worker": slot.worker_id})
                return
            await asyncio.sleep(pause_s)

    async def _end_all(self) -> None:
        """They were told to shut down; who is still there after STOP_GRACE_S is killed."""
        processes = [slot.process for slot in self._slots.values() if slot.process is not None]
        ends = [asyncio.ensure_future(process.exited()) for process in processes]
        if ends:
            await asyncio.wait(ends, timeout=STOP_GRACE_S)
        for process in processes:
            process.kill()
        await asyncio.gather(*ends)
