"""Whole answers, and the heads of all."""

from __future__ import annotations

import time
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

import msgspec

from dynrt.runtime.http.request import Request

JSON = "application/json"

_PHRASES = {status.value: status.phrase for status in HTTPStatus}
_WITHOUT_BODY = (204, 304)


class Response(msgspec.Struct):
    """An answer that is not streamed."""

    body: bytes = b""
    status: int = 200
    media_type: str = JSON
    headers: dict[str, str] = {}  # further ones


def json_response(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body))


def encode_response(request: Request, response: Response) -> bytes:
    """`response` as it goes out, with the headers that all have."""
    own = ""
    for name, value in response.headers.items():
        own += f"{name}: {value}\r\n"
    if response.status not in _WITHOUT_BODY:
        own += f"Content-Type: {response.media_type}\r\nContent-Length: {len(response.body)}\r\n"
    head = encode_head(request, response.status, own)
    return head if request.method == "HEAD" else head + response.body


def encode_head(request: Request, status: int, own_lines: str) -> bytes:
    """Status line and headers; `own_lines`: those of this kind of answer."""
    endpoint = request.endpoint
    if endpoint.open_requests.ending:
        request.keeps_alive = False
    return (
        f"HTTP/1.{request.is_http_1_1:d} {status} {_PHRASES[status]}\r\n{own_lines}"
        f"X-Request-Id: {request.record.request_id}\r\nServer: dynrt\r\nDate: {_http_date(int(time.time()))}\r\n"
        f"{endpoint.guard.cors_lines(request)}{_connection_line(request)}\r\n"
    ).encode("ascii", "replace")  # what is not ASCII can only be a client's own, given back


def _connection_line(request: Request) -> str:
    """Only where it is not what the version has by default."""
    if request.keeps_alive == request.is_http_1_1:
        return ""
    return "Connection: keep-alive\r\n" if request.keeps_alive else "Connection: close\r\n"


@lru_cache(maxsize=1)
def _http_date(second: int) -> str:
    """Asked for once in a second of many answers."""
    return formatdate(second, usegmt=True)
