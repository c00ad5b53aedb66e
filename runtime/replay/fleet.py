"""The spawner of a replay: engine processes that are objects, on the same event loop in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from dynrt.engines.config import EngineConfig
from dynrt.engines.sim.handoffs import Peers
from dynrt.engines.sim.skipping import LONGEST_STRETCH, SkippingCore
from dynrt.engines.sim.worker import SimWorker
from dynrt.runtime.memory_channel import MemoryChannel
from dynrt.runtime.messages import Role, ToEngine

FIRST_PID = 1


class SimProcess:
    """A Process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def exited(self) -> int:
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        self.end(-9)

    def release(self) -> None:
        """Nothing to close here."""

    def end(self, status: int = 0) -> None:
        if not self._status.done():
            self._status.set_result(status)


class SimulatedFleet:
    """A Spawner. `longest_stretch`: see engines.sim.skipping."""

    def __init__(
        self, channel: MemoryChannel, block_size: int, longest_stretch: int = LONGEST_STRETCH
    ) -> None:
        self._channel = channel
        self._block_size = block_size
        self._longest_stretch = longest_stretch
        self._peers: Peers = {}
        self.workers: list[SimWorker] = []

    def spawn(self, config: EngineConfig, address: str, spawn_token: str) -> SimProcess:
        assert address == self._channel.address, (address, self._channel.address)
        process = SimProcess(FIRST_PID + len(self.workers))
        worker = self._start(msgspec.structs.replace(config, block_size=self._block_size), process)
        asyncio.get_running_loop().call_soon(worker.register, spawn_token, process.pid)
        return process

    def adopt(self, pid: int) -> SimProcess:
        raise AssertionError("no engine joins a replay by itself")

    def of_role(self, role: Role) -> Iterator[SimWorker]:
        return (worker for worker in self.workers if worker.role == role)

    def _start(self, config: EngineConfig, process: SimProcess) -> SimWorker:
        def receive(message: ToEngine) -> None:
            worker.on_message(message)

        incarnation = f"{config.role}-{len(self.workers)}"
        connection = self._channel.connect(incarnation, receive)
        core = SkippingCore(config, longest_stretch=self._longest_stretch)
        worker = SimWorker(core, config, incarnation, self._peers, connection.send, process.end)
        self.workers.append(worker)
        return worker
