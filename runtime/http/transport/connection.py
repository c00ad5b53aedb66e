"""One client's connection: parses its requests, has them answered one behind the other, cuts off who does not read."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from aiohttp.base_protocol import BaseProtocol
from aiohttp.http import HttpProcessingError, HttpRequestParser, RawRequestMessage
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.tcp_helpers import tcp_keepalive

from dynrt.runtime.http.access_log import note_answer
from dynrt.runtime.http.body import BrokenBodyError
from dynrt.runtime.http.endpoint import Endpoint
from dynrt.runtime.http.envelope import refuse
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import Response, encode_response
from dynrt.runtime.http.transport.faults import MAX_LINE_BYTES, NO_REQUEST, told_of_fault
from dynrt.runtime.http.transport.outflow import Outflow

log = logging.getLogger("dynrt.http")

KEEPALIVE_S = 75.0  # longer than clients keep a pooled connection, so that they are the ones to close it
UNREAD_S = 60.0  # for a reader to take what is buffered for it, whatever kind of answer it is
LINGER_S = 10.0  # for the rest of a body that was refused: who cannot send it does not read the answer
MAX_HEADERS = 128
MAX_PIPELINED = 32  # requests that wait for their turn; then nothing more is read
READ_BYTES = 2**18  # of a body ahead of its reader

Answer = Callable[[Request], Awaitable[Response | None]]  # None: the answer was a stream, which is out
Arrived = tuple[RawRequestMessage | HttpProcessingError, StreamReader]


class ClientLeftError(Exception):
    """The connection is gone: nobody is left to answer."""


class Connection(BaseProtocol):
    """aiohttp's parser and flow control of reading, with one task for all requests.

    A client that leaves cancels the task, and with it the request that is being answered.
    """

    __slots__ = (
        "_answer",
        "_arrival",
        "_arrived",
        "_connections",
        "_endpoint",
        "_ends",
        "_has_fault",
        "_idle_since_s",
        "_idle_timer",
        "_newest_body",
        "_unread_timer",
        "outflow",
        "task",
    )

    _parser: HttpRequestParser

    def __init__(
        self,
        endpoint: Endpoint,
        answer: Answer,
        connections: set[Connection],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        parser = HttpRequestParser(
            self,
            loop,
            READ_BYTES,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
            payload_exception=BrokenBodyError,
            max_msg_queue_size=MAX_PIPELINED + 1,  # and the one that is being answered
        )
        super().__init__(loop, parser)
        self._endpoint = endpoint
        self._answer = answer
        self._connections = connections  # those that are open, of its server
        self._arrived: deque[Arrived] = deque()
        self._arrival: asyncio.Future[None] | None = None  # while the task waits for a request
        self._ends = False  # behind the request that is being answered
        self._has_fault = False  # was sent what is no HTTP: what follows cannot be told from it
        self._newest_body: StreamReader = EMPTY_PAYLOAD  # of the request that arrived last
        self._idle_since_s = 0.0
        self._unread_timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None]  # from the moment that it is connected
        self.outflow: Outflow  # likewise
        self._idle_timer: asyncio.TimerHandle  # likewise

    # What the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        tcp_keepalive(self.transport)
        self.outflow = Outflow(self.transport)
        self._endpoint.http_counter.connected()
        self._idle_since_s = self._loop.time()
        self._close_if_idle()
        self.task = self._loop.create_task(self._serve())
        self.task.add_done_callback(lambda _: self._connections.discard(self))
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            arrived, wants_upgrade, rest = self._parser.feed_data(data)
            self._take_up(arrived)
            while wants_upgrade:  # to a protocol that is not spoken here: what follows is HTTP as before
                self._parser.set_upgraded(False)
                arrived, wants_upgrade, rest = self._parser.feed_data(rest)
                self._take_up(arrived)
        except HttpProcessingError as fault:
            if not self._has_fault:
                self._has_fault = True
                self._tell_of(fault)

    def pause_writing(self) -> None:
        super().pause_writing()
        assert self.transport is not None
        self._unread_timer = self._loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.outflow.close()
        super().connection_lost(exc)
        self._endpoint.http_counter.disconnected()
        self._forget_unread()
        self._idle_timer.cancel()
        self.task.cancel()

    def _take_up(self, arrived: Sequence[Arrived]) -> None:
        if not arrived:
            return
        self._arrived.extend(arrived)
        self._newest_body = arrived[-1][1]
        self._wake()
        if len(self._arrived) >= MAX_PIPELINED and not self._buffer_paused:
            self._pause_reading_for_buffer()

    def _tell_of(self, fault: HttpProcessingError) -> None:
        """To whom it concerns: whoever reads the body that it ends, or else as a request of its own."""
        if self._newest_body.is_eof():
            self._take_up([(fault, EMPTY_PAYLOAD)])
        else:
            self._newest_body.set_exception(BrokenBodyError(fault.message))

    # What bodies call

    def resume_reading(self, resume_parser: bool = True) -> None:
        if self._reading_paused:  # else nothing is held back, as of most requests
            super().resume_reading(resume_parser)

    # What answers call

    def write(self, data: bytes) -> None:
        """Does not wait; see `drain`. Raises ClientLeftError."""
        transport = self.transport
        if transport is None or transport.is_closing():
            raise ClientLeftError
        self.outflow.write(data)

    def abort(self) -> None:
        """Cut off a client that does not read."""
        if self.transport is not None:
            self.transport.abort()

    async def drain(self) -> None:
        """Wait while the transport holds more than its high-water mark. Raises ClientLeftError."""
        if not self._paused:
            return
        try:
            await self._drain_helper()
        except ConnectionError:
            raise ClientLeftError from None

    # What the server calls

    def close(self) -> None:
        """End it behind the request that is being answered; at once, if none is."""
        self._ends = True
        self._wake()

    # The task

    async def _serve(self) -> None:
        try:
            while not self._ends:
                if not self._arrived:
                    self._idle_since_s = self._loop.time()
                    self._arrival = self._loop.create_future()
                    await self._arrival
                    self._arrival = None
                else:
                    await self._answer_next()
        except ClientLeftError:
            pass
        except Exception:
            log.exception("a connection failed")
        finally:
            self._close_transport()

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    async def _answer_next(self) -> None:
        head, body = self._arrived.popleft()
        if isinstance(head, HttpProcessingError):
            self._answer_fault(head)
            return
        request = Request(head, body, self, self._endpoint)
        response = await self._answer(request)
        if response is not None:
            self.write(encode_response(request, response))
            if self._paused:
                await self.drain()
        if not (body.is_eof() or await self._has_read_off(body)) or not request.keeps_alive:
            self._ends = True
        self._parser.message_consumed()
        if self._buffer_paused:
            self._read_on()

    def _answer_fault(self, fault: HttpProcessingError) -> None:
        self._ends = True
        request = Request(NO_REQUEST, EMPTY_PAYLOAD, self, self._endpoint)
        response = refuse(request, told_of_fault(fault))
        note_answer(request, response.status, self._loop.time())
        self.write(encode_response(request, response))

    def _read_on(self) -> None:
        """Once half of the requests that waited are answered: parse what was read already, then read more."""
        if len(self._arrived) > MAX_PIPELINED // 2:
            return
        self.data_received(b"")
        if len(self._arrived) < MAX_PIPELINED:
            self._resume_reading_for_buffer()

    async def _has_read_off(self, body: StreamReader) -> bool:
        """Whether the rest of `body` came in time, to be ignored: the next request is behind it."""
        try:
            async with asyncio.timeout(LINGER_S):
                while not body.is_eof():
                    await body.readany()
        except (TimeoutError, BrokenBodyError):
            return False
        return True

    def _close_transport(self) -> None:
        """It is closed once its buffer is read: never, if nobody reads."""
        transport = self.transport
        if transport is None:
            return
        transport.close()
        if transport.get_write_buffer_size() and self._unread_timer is None:
            self._unread_timer = self._loop.call_later(UNREAD_S, transport.abort)

    def _forget_unread(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None

    def _close_if_idle(self) -> None:
        """Looks whenever the connection could have been idle for too long; headers must be there in time as well."""
        now_s = self._loop.time()
        waits = self._arrival is not None
        if waits and now_s - self._idle_since_s >= KEEPALIVE_S:
            self.close()
            return
        next_look_s = KEEPALIVE_S + (self._idle_since_s if waits else now_s)
        self._idle_timer = self._loop.call_at(next_look_s, self._close_if_idle)
