"""One HTTP request, as its handler sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import unquote

from aiohttp import HttpVersion11
from aiohttp.http import RawRequestMessage
from aiohttp.streams import StreamReader

from dynrt.runtime.http.request_record import RequestRecord
from dynrt.runtime.http_counts import NO_ROUTE

if TYPE_CHECKING:
    from dynrt.runtime.http.endpoint import Endpoint
    from dynrt.runtime.http.transport.connection import Connection


class Request:
    """`record` is what is noted of it on the way; `body` may still be arriving."""

    __slots__ = (
        "body",
        "connection",
        "endpoint",
        "headers",
        "is_http_1_1",
        "keeps_alive",
        "method",
        "path",
        "raw_path",
        "record",
        "route",
    )

    def __init__(
        self, head: RawRequestMessage, body: StreamReader, connection: Connection, endpoint: Endpoint
    ) -> None:
        self.method = head.method
        self.raw_path = raw_path = head.url.raw_path  # without host and query
        self.path = unquote(raw_path) if "%" in raw_path else raw_path
        self.headers = head.headers
        self.is_http_1_1 = head.version >= HttpVersion11
        self.keeps_alive = not head.should_close  # the connection, when this is answered
        self.body = body
        self.connection = connection
        self.endpoint = endpoint
        self.record = RequestRecord.of(head.headers)
        self.route = NO_ROUTE  # the path as the table of routes has it, so that there are few
