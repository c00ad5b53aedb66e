"""One response of server-sent events: held back until its first event, pinged while silent, cut if not read.

Head and end are aiohttp's; the events between go past it, one write each, as its way costs several times what the
rest of a token does: those that may wait to the transport, ready ones into the stream's outflow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cached_property
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import HttpVersion11, web

from dynrt.runtime.errors import DynrtError
from dynrt.runtime.http.envelope import encode_error
from dynrt.runtime.http.request_record import record_of
from dynrt.runtime.http.transport.connection import Connection
from dynrt.runtime.http.transport.outflow import Outflow

PING_S = 15.0  # a started stream that is silent for so long gets a comment: proxies cut idle ones at 60 s
LOOKS_PER_PING = 3  # a look tells whether there were events since the last one, not when
STALL_S = 30.0  # a write that waits for its reader for so long ends the request

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class ClientLeftError(Exception):
    """The connection is gone: nobody is left to answer."""


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

    def __init__(self, request: web.Request, ending: Ending = OPENAI_ENDING) -> None:
        self._request = request
        self._ending = ending
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._finished = False
        self._writing = False
        self._last_event_s = 0.0
        self._record = record_of(request)
        self._is_chunked = request.version >= HttpVersion11
        self.outflow = Outflow(is_chunked=self._is_chunked)

    @cached_property
    def response(self) -> web.StreamResponse:
        """Made when it is needed: most answers are no streams."""
        response = web.StreamResponse(headers=HEADERS)
        if self._is_chunked:
            response.enable_chunked_encoding()
        else:
            response.force_close()  # such a stream has no end but the connection's
        return response

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.outflow.stop()
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
        if self._timer is None:
            await self.response.prepare(self._request)
            self._look_later()
            await self._write_watched(self.response.write(events))
            self._start_outflow()
        else:
            await self._write(events)

    async def finish(self, events: bytes) -> None:
        """Send the last `events`, the API's ending and the end of the body."""
        self._finished = True
        await self.send(events + self._ending.last)
        self._record.sent_status = self.response.status
        with suppress(ClientLeftError):  # nothing is missing to a client that closes behind it
            await self._write_watched(self.response.write_eof())

    async def fail(self, error: DynrtError) -> None:
        """Finish a started stream with `error`, unless all has been said."""
        if not self._finished:
            await self.finish(self._ending.failure(error, self._record.request_id))

    def _start_outflow(self) -> None:
        connection = self._request.protocol
        assert isinstance(connection, Connection), "the server makes no other"
        if connection.transport is not None:
            connection.outflow = self.outflow
            self.outflow.start(connection.transport)

    async def _write(self, events: bytes) -> None:
        """Raises ClientLeftError; waits while the transport holds more than its high-water mark."""
        transport = self._request.transport
        if transport is None or transport.is_closing():
            raise ClientLeftError
        transport.write(self.outflow.framed(events))
        self.outflow.look()
        await self._write_watched(self._request.writer.drain())

    async def _write_watched(self, write: Awaitable[None]) -> None:
        self._note_write(True)
        try:
            await write
        except ConnectionError:
            raise ClientLeftError from None
        finally:
            self._note_write(False)

    def _note_write(self, writing: bool) -> None:
        self._writing = writing
        self._last_event_s = self._loop.time()

    def _look_later(self) -> None:
        self._timer = self._loop.call_later(PING_S / LOOKS_PER_PING, self._look)

    def _look(self) -> None:
        """Ping a silent stream; abort the connection of a stalled one, which cancels the request's handler."""
        now = self._loop.time()
        if self.outflow.has_written:
            self.outflow.has_written = False
            self._last_event_s = now
        silent_s = now - self._last_event_s
        if self._writing and silent_s >= STALL_S:
            self._cut()
            return
        if not self._writing and silent_s >= PING_S:
            self.outflow.take(PING, [])
        self._look_later()

    def _cut(self) -> None:
        self._record.outcome = "client_stalled"
        if self._request.transport is not None:
            self._request.transport.abort()
