"""Faults below the routes: bytes that are no request, clients that dawdle, readers that do not read."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import closing

import pytest
from scripted_backend import DEADLINE_S, RawConnection, ScriptedBackend, http_request, text

from dynrt.runtime.http import body
from dynrt.runtime.http.transport import connection
from dynrt.runtime.http.transport.server import HttpServer
from dynrt.runtime.requests import GenerateOutput

TEXT = "/v1/completions"
POST = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\n".encode()
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
GET = b"GET /live HTTP/1.1\r\nHost: x\r\n"

Connect = Callable[[], Awaitable[RawConnection]]

FAULTS = [
    (b"\x16\x03\x01\x02\x00 tls hello\r\n\r\n", 400, "HTTPS"),
    (b"hello there\r\n\r\n", 400, "no valid HTTP request"),
    (b"GET /live HTTP/3.7\r\n\r\n", 400, "no valid HTTP request"),
    (b"GET /live HTTP/1.1\r\n\r\n", 400, "Host"),
    (b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n", 400, "URL"),
    (GET + b"no colon\r\n\r\n", 400, "header"),
    (b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 431, "8190 bytes"),
    (GET + b"X-Long: " + b"a" * 9000 + b"\r\n\r\n", 431, "8190 bytes"),
    (GET + b"".join(b"X-%d: a\r\n" % i for i in range(200)) + b"\r\n", 400, "Too many headers"),
    (POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello", 400, "Content-Length"),
    (POST + b"Content-Length: -5\r\n\r\n", 400, "Content-Length"),
    (POST + b"Content-Encoding: zstd\r\nContent-Length: 5\r\n\r\nhello", 415, "Content-Encoding"),
    (CHUNKED + b"zz\r\n", 400, "chunk size"),
    (CHUNKED + b"1" * 9000, 400, "hunk size"),
    (CHUNKED + b"3\r\n{}toolong\r\n0\r\n\r\n", 400, "chunk"),
]


@pytest.mark.parametrize(("raw", "status", "clause"), FAULTS)
async def test_a_fault_is_told_in_the_envelope(
    connect: Connect, raw: bytes, status: int, clause: str, caplog: pytest.LogCaptureFixture
) -> None:
    client = await connect()
    with caplog.at_level(logging.INFO, "dynrt.http"):
        client.send(raw)
        got, headers, answer = await client.response()
        assert await client.rest() == b"", "what follows cannot be told from the fault: closed"
    assert got == status and headers["content-type"].startswith("application/json")
    assert headers["x-request-id"]
    error = json.loads(answer)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert clause in error["message"] and "aaaa" not in error["message"]
    [line] = [record for record in caplog.records if record.name == "dynrt.http"]
    assert (line.levelno, line.status, line.outcome) == (logging.INFO, status, "failed")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("expectation", [[], ["Expect: a miracle"]])
async def test_old_clients_and_odd_expectations_are_served(
    connect: Connect, version: str, expectation: list[str]
) -> None:
    client = await connect()
    client.send(http_request(TEXT, text(), *expectation, version=version))
    status, headers, answer = await client.response()
    assert status == 200 and json.loads(answer)["choices"] and "transfer-encoding" not in headers


async def test_a_client_that_never_sends_its_headers_is_closed(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "KEEPALIVE_S", 0.1)
    client = await connect()
    client.send(GET)
    assert await client.rest() == b""


async def test_a_client_that_never_sends_its_body_is_refused(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "BODY_DEADLINE_S", 0.1)
    client = await connect()
    client.send(POST + b"Content-Length: 9\r\n\r\n{")
    status, _headers, answer = await client.response()
    assert status == 400 and "0.1 s" in json.loads(answer)["error"]["message"]


async def test_a_fault_in_a_body_that_is_being_read_is_told_at_once(connect: Connect) -> None:
    client = await connect()
    client.send(GET + b"\r\n" + CHUNKED + b"1\r\n{\r\n")
    assert (await client.response())[0] == 200, "the request behind it has begun"
    client.send(b"zz\r\n")
    status, _headers, answer = await client.response()
    assert status == 400 and "framed" in json.loads(answer)["error"]["message"]
    assert await client.rest() == b""


# Among those of 100,000 and more, one ends in the server's own buffer, too short for it to wait for its reader.
@pytest.mark.parametrize("chars", [8_000_000, *range(100_000, 400_000, 50_000)])
async def test_a_whole_answer_that_nobody_reads_has_a_limit(
    server: HttpServer, backend: ScriptedBackend, chars: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "UNREAD_S", 0.1)
    lost = notices_lost_connections(monkeypatch)
    backend.script = [GenerateOutput([1], "x" * chars, "stop")]
    with closing(socket.socket()) as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        stalled.sendall(http_request(TEXT, text(), "Connection: close"))
        async with asyncio.timeout(DEADLINE_S):
            await lost.wait()


def notices_lost_connections(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    lost, original = asyncio.Event(), connection.Connection.connection_lost

    def connection_lost(self: connection.Connection, exc: BaseException | None) -> None:
        original(self, exc)
        lost.set()

    monkeypatch.setattr(connection.Connection, "connection_lost", connection_lost)
    return lost


async def test_a_reader_that_pauses_and_goes_on_is_served(
    server: HttpServer, backend: ScriptedBackend
) -> None:
    backend.script = [GenerateOutput([1], "x" * 2_000_000, "stop")]
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(server.url.rpartition(":")[2]), limit=4096
    )
    writer.write(http_request(TEXT, text(), "Connection: close"))
    async with asyncio.timeout(DEADLINE_S):
        await backend.closed.wait()
        answer = await reader.read()
    assert len(answer) > 2_000_000 and answer.endswith(b"}")
    writer.close()
