"""The runtime as a front process sees it: prompts are tokenized here, everything else is asked for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable

from dynrt.runtime.chunks import data_of
from dynrt.runtime.errors import AskTimeoutError
from dynrt.runtime.frame_sink import FrameSink
from dynrt.runtime.fronts.messages import (
    Beat,
    FromFront,
    Generate,
    Item,
    Items,
    Leave,
    MetricsText,
    MetricsWanted,
    State,
)
from dynrt.runtime.http_counts import HttpCounts
from dynrt.runtime.offload import Offload
from dynrt.runtime.prompts import PromptEncoder
from dynrt.runtime.requests import GenerateOutput, GenerateRequest, ModelCard
from dynrt.runtime.tokenizing import Tokenizing

METRICS_TIMEOUT_S = 5.0


class RemoteBackend(Tokenizing):
    """An http.backend.Backend. `send` carries messages to the runtime; its own come to `on_message`."""

    def __init__(self, prompts: PromptEncoder, offload: Offload, send: Callable[[FromFront], None]) -> None:
        super().__init__(prompts, offload)
        self._send = send
        self._numbers = itertools.count()
        self._open: dict[int, _News] = {}
        self._metrics: dict[int, asyncio.Future[bytes]] = {}
        self._state = State([], "the runtime has not answered yet", is_draining=False, is_ending=False)

    def on_message(self, message: State | Items | MetricsText) -> None:
        match message:
            case Items(items):
                for item in items:
                    if (news := self._open.get(item.number)) is not None:
                        news.arrive(item)
            case State():
                self._state = message
            case MetricsText(number, text):
                if (wanted := self._metrics.pop(number, None)) is not None and not wanted.done():
                    wanted.set_result(text)

    async def generate(
        self, request: GenerateRequest, sink: FrameSink | None = None
    ) -> AsyncGenerator[GenerateOutput, None]:
        number = next(self._numbers)
        news = self._open[number] = _News(sink)
        is_over = False
        self._send(Generate(number, request))
        try:
            while not is_over:
                item = await news.next()
                is_over = item.failure is not None or _is_last(item)
                yield _output(item)
        finally:
            del self._open[number]
            if not is_over:
                self._send(Leave(number))

    def models(self) -> list[ModelCard]:
        return self._state.cards

    def ready(self) -> str | None:
        return self._state.why_not_ready

    def draining(self) -> bool:
        return self._state.is_draining

    def count_http(self, counts: HttpCounts) -> None:
        self._send(Beat(counts))

    async def metrics(self) -> bytes:
        """Of the whole runtime, whichever front is asked. Raises AskTimeoutError."""
        number = next(self._numbers)
        wanted: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._metrics[number] = wanted
        self._send(MetricsWanted(number))
        try:
            async with asyncio.timeout(METRICS_TIMEOUT_S):
                return await wanted
        except TimeoutError:
            raise AskTimeoutError(f"the runtime did not answer within {METRICS_TIMEOUT_S:g} s") from None
        finally:
            self._metrics.pop(number, None)


class _News:
    """What came for one request and waits to be read; bounded by its max_tokens."""

    def __init__(self, sink: FrameSink | None) -> None:
        self._sink = sink
        self._items: list[Item] = []
        self._reader: asyncio.Future[None] | None = None  # who has dealt with everything and waits for more

    def arrive(self, item: Item) -> None:
        """A mere event goes past a waiting reader, if the sink takes it."""
        is_awaited = self._reader is not None and not self._items
        if (
            is_awaited
            and _is_event(item)
            and self._sink is not None
            and self._sink.take(item.chunk, item.token_id)
        ):
            return
        self._items.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def next(self) -> Item:
        if not self._items:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._items.pop(0)


def _is_event(item: Item) -> bool:
    return item.output is None and item.failure is None


def _is_last(item: Item) -> bool:
    return item.output is not None and item.output.finish_reason is not None


def _output(item: Item) -> GenerateOutput:
    """Raises the DynrtError that a failure stands for."""
    if item.failure is not None:
        raise item.failure.error()
    frames = data_of(item.chunk) if item.chunk else b""
    return item.output or GenerateOutput([item.token_id], "", frames=frames)
