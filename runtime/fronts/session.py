"""What the runtime does for one front: runs its requests, and sends what they bring, one message a turn of the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Protocol

from dynrt.runtime.errors import DynrtError
from dynrt.runtime.frame_sink import FrameSink
from dynrt.runtime.fronts.messages import (
    Beat,
    Failure,
    FromFront,
    Generate,
    Hello,
    Item,
    Items,
    Leave,
    Listening,
    MetricsText,
    MetricsWanted,
    ToFront,
)
from dynrt.runtime.http_counts import HttpCounts
from dynrt.runtime.requests import GenerateOutput, GenerateRequest

log = logging.getLogger("dynrt.fronts")


class Served(Protocol):
    """What a front's requests need of the runtime."""

    def generate(
        self, request: GenerateRequest, sink: FrameSink | None = None
    ) -> AsyncGenerator[GenerateOutput, None]: ...

    def count_http(self, counts: HttpCounts) -> None: ...

    def metrics_text(self) -> bytes: ...


class FrontSession:
    """From a front's start to its end. The number of its requests is bounded by the runtime's own limit.

    `listens` is set once the front takes connections.
    """

    def __init__(self, runtime: Served, send: Callable[[ToFront], None], listens: asyncio.Event) -> None:
        self._runtime = runtime
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._items: list[Item] = []
        self._connections = 0
        self._listens = listens
        self.heard_at = self._loop.time()

    @property
    def open_requests(self) -> int:
        return len(self._tasks)

    def on_message(self, message: FromFront) -> None:
        self.heard_at = self._loop.time()
        match message:
            case Listening():
                self._listens.set()
            case Hello():
                pass
            case Beat(counts):
                self._connections += counts.connections
                self._runtime.count_http(counts)
            case Generate(number, request):
                self._start(number, request)
            case Leave(number):
                if number in self._tasks:
                    self._tasks[number].cancel()
            case MetricsWanted(number):
                self._send(MetricsText(number, self._runtime.metrics_text()))

    async def end(self) -> None:
        """The front is gone: nobody waits for its requests, and its connections are closed."""
        self._runtime.count_http(HttpCounts([], -self._connections))
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def put(self, item: Item) -> None:
        if not self._items:
            self._loop.call_soon(self._flush)
        self._items.append(item)

    def _start(self, number: int, request: GenerateRequest) -> None:
        task = self._loop.create_task(self._run(number, request), name=f"request {number} of a front")
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number))

    async def _run(self, number: int, request: GenerateRequest) -> None:
        try:
            async with aclosing(self._runtime.generate(request, _Sink(self, number))) as outputs:
                async for output in outputs:
                    self.put(Item(number, output=output))
        except DynrtError as error:
            self.put(Item(number, failure=Failure.of(error)))
        except Exception as error:
            log.error("internal error in request %s", request.request_id, exc_info=error)
            told = f"internal error; the server's log has it under request id {request.request_id}"
            self.put(Item(number, failure=Failure.of(DynrtError(told))))

    def _flush(self) -> None:
        items, self._items = self._items, []
        self._send(Items(items))


class _Sink:
    """A request's events join the message that is being made; the front keeps account of them."""

    descriptor: int | None = None
    num_tokens = 0
    has_written = False

    def __init__(self, session: FrontSession, number: int) -> None:
        self._session = session
        self._number = number

    def take(self, chunk: bytes, token_id: int) -> bool:
        self._session.put(Item(self._number, chunk, token_id))
        return True

    def write_rest(self, rest: bytes) -> None:
        raise AssertionError("it has no descriptor")
