"""One client's connection: aiohttp's protocol, with faults told in the envelope and stalled readers cut off."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import ContentEncodingError, InvalidURLError, LineTooLong

from dynrt.runtime.errors import DynrtError, HeadersTooLargeError, InvalidRequestError
from dynrt.runtime.http.access_log import log_refusal
from dynrt.runtime.http.body import unsupported_encoding
from dynrt.runtime.http.envelope import error_response, told_to_client
from dynrt.runtime.http.request_record import record_of
from dynrt.runtime.http.transport.outflow import Outflow
from dynrt.runtime.http_counts import NO_ROUTE, HttpCounter

log = logging.getLogger("dynrt.http")

KEEPALIVE_S = 75.0  # longer than clients keep a pooled connection, so that they are the ones to close it
UNREAD_S = 60.0  # for a reader to take what is buffered for it, whatever kind of answer it is
MAX_LINE_BYTES = 8190  # of the request line, and of each header
MAX_HEADERS = 128


class Connection(web.RequestHandler):
    """`manager` is the aiohttp server that routes its requests and closes it in the end."""

    __slots__ = ("_counter", "_unread", "outflow")

    def __init__(self, manager: web.Server, loop: asyncio.AbstractEventLoop, counter: HttpCounter) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=KEEPALIVE_S,
            access_log=None,  # type: ignore[arg-type]  # as aiohttp's own runner does
            logger=log,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            max_headers=MAX_HEADERS,
        )
        self._counter = counter
        self._unread: asyncio.TimerHandle | None = None
        self.outflow: Outflow | None = None  # of the response that was begun last

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._counter.connected()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp itself refuses, ahead of routes and middlewares: bytes that are no HTTP request."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has been begun; it cannot become an error any more")
        record = record_of(request)
        error = _fault(exc, message) if status < 500 else told_to_client(_bug(exc), record.request_id)
        response = error_response(error, request)
        response.headers["X-Request-Id"] = record.request_id
        response.force_close()
        self._counter.answered(NO_ROUTE, error.status)
        log_refusal(request, error.status)
        return response

    def log_exception(self, *args: Any, **kwargs: Any) -> None:
        is_clients_fault = isinstance(kwargs.get("exc_info"), web.RequestPayloadError)  # and told to it
        if not is_clients_fault:
            super().log_exception(*args, **kwargs)

    async def start(self) -> None:
        """Until the connection is closing, which it does once its buffer is read: never, if nobody reads."""
        transport = self.transport
        try:
            await super().start()
        finally:
            if transport is not None and transport.get_write_buffer_size() and self._unread is None:
                self._unread = self._loop.call_later(UNREAD_S, transport.abort)

    def pause_writing(self) -> None:
        super().pause_writing()
        assert self.transport is not None
        self._unread = self._loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_unread()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self.outflow is not None:
            self.outflow.stop()
        super().connection_lost(exc)
        self._counter.disconnected()
        self._forget_unread()

    def _forget_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None


def _fault(exc: BaseException | None, message: str | None) -> DynrtError:
    """What is wrong with bytes that could not be parsed; nothing of them is repeated."""
    match exc:
        case LineTooLong():
            return HeadersTooLargeError(
                f"the request line or a header is larger than {MAX_LINE_BYTES} bytes, the most that is read;"
                " shorten it"
            )
        case ContentEncodingError():
            return unsupported_encoding()
        case InvalidURLError():
            return InvalidRequestError(
                "the URL of the request cannot be parsed; escape what is special in it"
            )
    reason = (message or "it cannot be parsed").partition("\n")[0].rstrip(":. ")
    return InvalidRequestError(f"this is no valid HTTP request: {reason}")


def _bug(exc: BaseException | None) -> Exception:
    return exc if isinstance(exc, Exception) else RuntimeError("no answer was made")
