"""What an engine is ordered to do between its steps, and the reservations that wait for room (no thread, no clock)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import msgspec

from dynrt.engines.protocol import EngineRequest, Reservation, StepOutput
from dynrt.planner.events import BlocksStored, CacheEvent, CacheEvents, CacheSnapshot
from dynrt.runtime.errors import InvalidRequestError
from dynrt.runtime.messages import EngineLoad, StatusRequest
from dynrt.transfer.events import HandoffId, ReserveRefused
from dynrt.transfer.local import CommitBlocks, PrefillOpened, ReleaseBlocks, ReservationMade

PENDING_RESERVATIONS_LIMIT = 4096
TOMBSTONES_LIMIT = 16_384


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


class OrderedEngine(Protocol):
    """What orders need of engines.protocol.Engine; see there."""

    def submit(self, request: EngineRequest) -> None: ...
    def cancel(self, key: bytes, epoch: int) -> None: ...
    def reserve(self, request: EngineRequest) -> Reservation | None: ...
    def commit(self, key: bytes, epoch: int, first_token: int | None) -> None: ...
    def release(self, key: bytes, epoch: int) -> None: ...
    def load(self) -> EngineLoad: ...
    def cache_snapshot(self) -> list[BlocksStored]: ...


class TransferInbox(Protocol):
    """Where the transfer side hears of handoffs."""

    def post(self, event: PrefillOpened | ReservationMade) -> None: ...


class Orders:
    """Carries orders out on the engine; what comes of it is told by `publish`."""

    def __init__(
        self,
        engine: OrderedEngine,
        transfer: TransferInbox,
        publish: Callable[[News], None],
    ) -> None:
        self._engine = engine
        self._transfer = transfer
        self._publish = publish
        self._pending: deque[Reserve] = deque()
        self._dropped: dict[HandoffId, None] = {}  # drops that may have crossed a commit, oldest first
        self._cache_seq = 0
        self._snapshot_wanted = False
        self._published_load = EngineLoad()

    def handle(self, order: Order) -> None:
        """Between two steps."""
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
                self._snapshot_wanted = True
            case StatusRequest(token):
                self._publish(StatusSeen(token, self._engine.load(), len(self._pending)))

    def reserve_pending(self) -> None:
        """First come, first served: the oldest waits until it fits, so that it cannot starve."""
        while self._pending:
            order = self._pending[0]
            try:
                reservation = self._engine.reserve(order.request)
            except InvalidRequestError as error:
                self._refuse(order, error.message, is_unfit=True)
            else:
                if reservation is None:
                    return
                self._reserved(order, reservation)
            self._pending.popleft()

    def report(self, output: StepOutput) -> None:
        """Publish what a step brought, if anything: engines may step to look whether something has come."""
        is_news = output.tokens or output.cache_events or output.timing is not None
        if is_news or output.load != self._published_load:
            self._published_load = output.load
            self._publish(StepDone(output, self._number(output.cache_events)))
        self._answer_snapshot()

    def report_load(self) -> None:
        """Publish the load if it is not what was published last."""
        self.report(StepOutput([], [], self._engine.load(), None))

    def _answer_snapshot(self) -> None:
        """Only when every cache event is published: a snapshot stands for all events before its number."""
        if self._snapshot_wanted:
            self._snapshot_wanted = False
            self._publish(CacheSnapshot(self._cache_seq, self._engine.cache_snapshot()))

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

    def _reserved(self, order: Reserve, made: Reservation) -> None:
        request = order.request
        num_tokens = len(request.prompt_ids) + len(request.output_ids)
        self._transfer.post(
            ReservationMade(
                request.key,
                request.epoch,
                order.peer,
                made.first_block,
                made.block_ids,
                order.lease_s,
                num_tokens,
            )
        )

    def _refuse(self, order: Reserve, reason: str, is_unfit: bool = False) -> None:
        self._publish(ReserveRefused(order.request.key, order.request.epoch, reason, is_unfit))

    def _number(self, events: list[CacheEvent]) -> CacheEvents | None:
        if not events:
            return None
        first_seq = self._cache_seq
        self._cache_seq += len(events)
        return CacheEvents(first_seq, events)
