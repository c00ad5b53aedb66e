"""The compute thread: feeds the engine between its steps and hands on what each step brought."""

from __future__ import annotations

import select
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from dynrt.engines.heartbeat import StepClock
from dynrt.engines.protocol import Engine, EngineRequest, LayerHook, Reservation, StepOutput
from dynrt.engines.wakeup import WakeupQueue
from dynrt.planner.events import CacheEvent, CacheEvents, CacheSnapshot
from dynrt.runtime.errors import InvalidRequestError
from dynrt.runtime.messages import EngineLoad, StatusRequest
from dynrt.transfer.events import ReserveRefused
from dynrt.transfer.local import CommitBlocks, PrefillOpened, ReleaseBlocks, ReservationMade

PENDING_RESERVATIONS_LIMIT = 4096
TOMBSTONES_LIMIT = 16_384

HandoffId = tuple[bytes, int]


class Generate(msgspec.Struct, frozen=True):
    """Run this request (a prefill_only one: for a handoff)."""

    request: EngineRequest


class Reserve(msgspec.Struct, frozen=True):
    """Set blocks aside for this prompt, as soon as there is room."""

    request: EngineRequest
    peer: str
    lease_s: float


class Drop(msgspec.Struct, frozen=True):
    """End this request wherever it is; a reservation made already is left to its handoff."""

    key: bytes
    epoch: int


class SnapshotWanted(msgspec.Struct, frozen=True):
    """Publish a CacheSnapshot."""


class StepDone(msgspec.Struct, frozen=True):
    """Published after each step, and whenever the load changed without one."""

    output: StepOutput
    cache: CacheEvents | None


class StatusSeen(msgspec.Struct, frozen=True):
    """Published in answer to a StatusRequest."""

    token: int
    load: EngineLoad
    pending_reservations: int


Order = Generate | Reserve | Drop | SnapshotWanted | StatusRequest | CommitBlocks | ReleaseBlocks
News = StepDone | StatusSeen | CacheSnapshot | ReserveRefused


class TransferPort(LayerHook, Protocol):
    """What the compute thread tells the transfer thread."""

    def post(self, event: PrefillOpened | ReservationMade) -> None: ...


class ComputeThread:
    """Owns the engine. Everything reaches it as an Order through `post`, and leaves it as News through `publish`."""

    def __init__(
        self,
        engine: Engine,
        transfer: TransferPort,
        clock: StepClock,
        publish: Callable[[News], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._clock = clock
        self._publish = publish
        self._on_failure = on_failure
        self._inbox: WakeupQueue[Order] = WakeupQueue()
        self._pending: deque[Reserve] = deque()
        self._dropped: dict[HandoffId, None] = {}  # drops that may have crossed a commit, oldest first
        self._cache_seq = 0
        self._published_load = EngineLoad()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        self._stopping = True
        self._inbox.put(SnapshotWanted())
        self._thread.join(timeout_s)

    def post(self, order: Order) -> None:
        """Thread-safe; never waits."""
        self._inbox.put(order)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            self._on_failure(error)

    def _turn(self) -> None:
        if not self._engine.has_work():
            select.select([self._inbox], [], [])
        for order in self._inbox.take_all():
            self._handle(order)
        self._reserve_pending()
        if self._engine.has_work():
            self._step()
        elif self._engine.load() != self._published_load:
            self._report(StepOutput([], [], self._engine.load(), None))

    def _handle(self, order: Order) -> None:
        match order:
            case Generate(request):
                self._submit(request)
            case Reserve():
                self._enqueue(order)
            case Drop(key, epoch):
                self._drop(key, epoch)
            case CommitBlocks():
                self._commit(order)
            case ReleaseBlocks(key, epoch):
                self._engine.release(key, epoch)
            case SnapshotWanted():
                self._publish(CacheSnapshot(self._cache_seq, self._engine.cache_snapshot()))
            case StatusRequest(token):
                self._publish(StatusSeen(token, self._engine.load(), len(self._pending)))

    def _submit(self, request: EngineRequest) -> None:
        if request.prefill_only:
            self._transfer.post(PrefillOpened(request.key, request.epoch))
        self._engine.submit(request)

    def _enqueue(self, order: Reserve) -> None:
        if len(self._pending) >= PENDING_RESERVATIONS_LIMIT:
            self._refuse(order, f"{PENDING_RESERVATIONS_LIMIT} reservations wait here already")
        else:
            self._pending.append(order)

    def _drop(self, key: bytes, epoch: int) -> None:
        waiting = [
            order for order in self._pending if (order.request.key, order.request.epoch) == (key, epoch)
        ]
        for order in waiting:
            self._pending.remove(order)
        self._engine.cancel(key, epoch)
        self._dropped[key, epoch] = None
        if len(self._dropped) > TOMBSTONES_LIMIT:
            del self._dropped[next(iter(self._dropped))]

    def _commit(self, order: CommitBlocks) -> None:
        if (order.key, order.epoch) in self._dropped:
            self._engine.release(order.key, order.epoch)
        else:
            self._engine.commit(order.key, order.epoch, order.first_token)

    def _reserve_pending(self) -> None:
        """First come, first served: the oldest waits until it fits, so that it cannot starve."""
        while self._pending:
            order = self._pending[0]
            try:
                reservation = self._engine.reserve(order.request)
            except InvalidRequestError as error:
                self._refuse(order, error.message)
            else:
                if reservation is None:
                    return
                self._announce(order, reservation)
            self._pending.popleft()

    def _announce(self, order: Reserve, made: Reservation) -> None:
        key, epoch = order.request.key, order.request.epoch
        self._transfer.post(
            ReservationMade(key, epoch, order.peer, made.first_block, made.block_ids, order.lease_s)
        )

    def _refuse(self, order: Reserve, reason: str) -> None:
        self._publish(ReserveRefused(order.request.key, order.request.epoch, reason))

    def _step(self) -> None:
        self._clock.begin()
        try:
            output = self._engine.step(self._transfer)
        finally:
            self._clock.end()
        self._report(output)

    def _report(self, output: StepOutput) -> None:
        self._published_load = output.load
        self._publish(StepDone(output, self._number(output.cache_events)))

    def _number(self, events: list[CacheEvent]) -> CacheEvents | None:
        if not events:
            return None
        first_seq = self._cache_seq
        self._cache_seq += len(events)
        return CacheEvents(first_seq, events)
