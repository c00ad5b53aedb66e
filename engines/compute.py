"""The compute thread: feeds the engine between its steps and hands on what each step brought."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from typing import Protocol

from dynrt.engines.heartbeat import StepClock
from dynrt.engines.orders import News, Order, Orders, SnapshotWanted, TransferInbox
from dynrt.engines.protocol import Engine, LayerHook
from dynrt.engines.wakeup import WakeupQueue


class TransferPort(LayerHook, TransferInbox, Protocol):
    """What the compute thread tells the transfer thread."""


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
        self._on_failure = on_failure
        self._orders = Orders(engine, transfer, publish)
        self._inbox: WakeupQueue[Order] = WakeupQueue()
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
            self._orders.handle(order)
        self._orders.reserve_pending()
        if self._engine.has_work():
            self._step()
        else:
            self._orders.report_load()

    def _step(self) -> None:
        self._clock.begin()
        try:
            output = self._engine.step(self._transfer)
        finally:
            self._clock.end()
        self._orders.report(output)
