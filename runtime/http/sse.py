"""One response of server-sent events: held back until its first event, pinged while silent, cut if not read.

Each event is one write: of the task that reads the outputs, or, of ready ones, of whoever brings them to the outflow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

import msgspec

from dynrt.runtime.chunks import LAST_CHUNK
from dynrt.runtime.errors import DynrtError
from dynrt.runtime.http.envelope import encode_error
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import encode_head

PING_S = 15.0  # a started stream that is silent for so long gets a comment: proxies cut idle ones at 60 s
LOOKS_PER_PING = 3  # a look tells whether there were events since the last one, not when
STALL_S = 30.0  # a write that waits for its reader for so long ends the request

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = (
    "Content-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\nX-Accel-Buffering: no\r\n"
)
CHUNKED = "Transfer-Encoding: chunked\r\n"


def event(body: msgspec.Struct) -> bytes:
    """`body` as one event; JSON from msgspec has no line breaks."""
    return data_event(msgspec.json.encode(body))


def data_event(json_body: bytes) -> bytes:
    return b"data: " + json_body + b"\n\n"


def named_event(body: msgspec.Struct) -> bytes:
    """`body`, a struct that has its type as tag, as an event of that name."""
    tag = body.__struct_config__.tag
    assert isinstance(tag, str), "the event has no type"
    return b"event: %b\n%b" % (tag.encode(), event(body))


class Ending(msgspec.Struct, frozen=True):
    """How the streams of an API end: what comes last of all, and how an error is told (with the request's id)."""

    last: bytes
    failure: Callable[[DynrtError, str], bytes]


OPENAI_ENDING = Ending(DONE, lambda error, request_id: data_event(encode_error(error)))


class EventStream:
    """`send` is for one task; a timer, which ends with the context, pings and cuts.

    Ready events of a started stream go through `outflow` without that task.
    """

    def __init__(self, request: Request, ending: Ending = OPENAI_ENDING) -> None:
        self._request = request
        self._connection = request.connection
        self._record = request.record
        self._ending = ending
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._finished = False
        self._waits = False  # for its reader
        self._last_event_s = 0.0
        self.outflow = request.connection.outflow

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self.outflow.end_stream()
            self.count_taken()

    def count_taken(self) -> None:
        """Note the tokens that went through the outflow."""
        self._record.output_tokens += self.outflow.num_tokens
        self.outflow.num_tokens = 0

    @property
    def started(self) -> bool:
        """Whether the status line is out, so that an error can only be an event."""
        return self._timer is not None

    async def send(self, events: bytes) -> None:
        """Send `events` in one write, behind status line and headers if they are the first."""
        head = b"" if self.started else self._begin()
        await self._write(head + self.outflow.framed(events))

    async def finish(self, events: bytes) -> None:
        """Send the last `events`, the API's ending and the end of the body."""
        self._finished = True
        head = b"" if self.started else self._begin()
        end = LAST_CHUNK if self._request.is_http_1_1 else b""
        await self._write(head + self.outflow.framed(events + self._ending.last) + end)
        self._record.sent_status = 200

    async def fail(self, error: DynrtError) -> None:
        """Finish a started stream with `error`, unless all has been said."""
        if not self._finished:
            await self.finish(self._ending.failure(error, self._record.request_id))

    def _begin(self) -> bytes:
        """The head, which is to be written before anything else is done."""
        request = self._request
        self._last_event_s = self._loop.time()
        self._look_later()
        self.outflow.begin_stream(is_chunked=request.is_http_1_1)
        if request.is_http_1_1:
            return encode_head(request, 200, HEADERS + CHUNKED)
        request.keeps_alive = False  # such a stream has no end but the connection's
        return encode_head(request, 200, HEADERS)

    async def _write(self, data: bytes) -> None:
        """Raises ClientLeftError; waits while the transport holds more than its high-water mark."""
        self._connection.write(data)
        if self._connection.writing_paused:
            await self._drain()

    async def _drain(self) -> None:
        self._waits = True
        try:
            await self._connection.drain()
        finally:
            self._waits = False

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(PING_S / LOOKS_PER_PING, self._look)

    def _look(self) -> None:
        """Ping a silent stream; abort the connection of a stalled one, which cancels the request's handler."""
        now = self._loop.time()
        if self.outflow.has_written:
            self.outflow.has_written = False
            self._last_event_s = now
        silent_s = now - self._last_event_s
        if self._waits and silent_s >= STALL_S:
            self._cut()
            return
        if not self._waits and silent_s >= PING_S and self.outflow.is_ready:
            self.outflow.write(self.outflow.framed(PING))
        self._look_later()

    def _cut(self) -> None:
        self._record.outcome = "client_stalled"
        self._connection.abort()
