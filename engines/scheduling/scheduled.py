"""What an engine with this scheduler and block pool answers without computing anything (sans-IO)."""

from __future__ import annotations

from dynrt.engines.protocol import EngineInfo, EngineRequest, Reservation
from dynrt.engines.scheduling.block_pool import BlockPool
from dynrt.engines.scheduling.limits import SchedulerLimits
from dynrt.engines.scheduling.scheduler import Scheduler
from dynrt.planner.events import BlocksStored
from dynrt.runtime.messages import EngineLoad


class ScheduledEngine:
    """That part of engines.protocol.Engine; subclasses plan and compute steps."""

    def __init__(self, info: EngineInfo, limits: SchedulerLimits) -> None:
        geometry = info.geometry[0]
        self._info = info
        self._pool = BlockPool(geometry.num_blocks, geometry.block_size)
        self._scheduler = Scheduler(limits, self._pool)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def submit(self, request: EngineRequest) -> None:
        self._scheduler.submit(request)

    def cancel(self, key: bytes, epoch: int) -> None:
        self._scheduler.cancel(key, epoch)

    def reserve(self, request: EngineRequest) -> Reservation | None:
        return self._scheduler.reserve(request)

    def commit(self, key: bytes, epoch: int, first_token: int | None) -> None:
        assert first_token is not None, "these engines go on behind prefill's first token"
        self._scheduler.commit(key, epoch, first_token)

    def release(self, key: bytes, epoch: int) -> None:
        self._scheduler.release(key, epoch)

    def has_work(self) -> bool:
        return self._scheduler.has_work() or self._pool.has_events()

    def load(self) -> EngineLoad:
        return self._scheduler.load()

    def cache_snapshot(self) -> list[BlocksStored]:
        return self._pool.snapshot()
