"""One response of server-sent events: held back until its first event, pinged while silent, cut if not read.

Head and end are aiohttp's; the events between go straight to the transport, one write each, as aiohttp's way costs
several times what the rest of a token does. So this module also does the chunk framing and heeds the high-water mark.
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

PING_S = 15.0  # a started stream that is silent for so long gets a comment: proxies cut idle ones at 60 s
STALL_S = 30.0  # a write that waits for its reader for so long ends the request
HIGH_WATER_BYTES = 64 * 1024  # the mark at which asyncio's and uvloop's transports pause whoever writes

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

    A started stream is a requests.FrameSink: `take` needs no task and does not wait.
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
        self._transport = request.transport
        self._is_chunked = request.version >= HttpVersion11

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

    @property
    def started(self) -> bool:
        """Whether the status line is out, so that an error can only be an event."""
        return self._timer is not None

    async def send(self, events: bytes) -> None:
        """Send `events` in one write, behind status line and headers if they are the first."""
        if self._timer is None:
            await self.response.prepare(self._request)
            self._timer = self._loop.call_later(PING_S, self._look)
            await self._write_watched(self.response.write(events))
        else:
            await self._write(events)

    def take(self, frames: bytes, token_ids: list[int]) -> bool:
        """Send `frames` now, without waiting; False if the stream has not started or its reader is slow."""
        transport = self._transport
        if (
            self._timer is None
            or transport is None
            or transport.is_closing()
            or transport.get_write_buffer_size() > HIGH_WATER_BYTES
        ):
            return False
        if frames:
            transport.write(self._framed(frames))
            self._last_event_s = self._loop.time()
        self._record.output_tokens += len(token_ids)
        return True

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

    async def _write(self, events: bytes) -> None:
        """Raises ClientLeftError; waits while the transport holds more than its high-water mark."""
        if self._transport is None or self._transport.is_closing():
            raise ClientLeftError
        self._transport.write(self._framed(events))
        await self._write_watched(self._request.writer.drain())

    def _framed(self, events: bytes) -> bytes:
        """One chunk of the body; HTTP/1.0 has none."""
        return b"%x\r\n%b\r\n" % (len(events), events) if self._is_chunked else events

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

    def _look(self) -> None:
        """Ping a silent stream; abort the connection of a stalled one, which cancels the request's handler."""
        limit_s = STALL_S if self._writing else PING_S
        left_s = self._last_event_s + limit_s - self._loop.time()
        if left_s <= 0 and self._writing:
            return self._cut()
        if left_s <= 0:
            self.take(PING, [])
            left_s = PING_S
        self._timer = self._loop.call_later(min(left_s, PING_S), self._look)
        return None

    def _cut(self) -> None:
        self._record.outcome = "client_stalled"
        if self._request.transport is not None:
            self._request.transport.abort()
