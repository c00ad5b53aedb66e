"""Connections: how they are framed, reused, left by their clients and read slowly; on asyncio and on uvloop."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing

import pytest
from scripted_backend import DEADLINE_S, RawConnection, ScriptedBackend, chat, events_of, http_request, text

from dynrt.runtime.http import sse
from dynrt.runtime.http.transport.connection import MAX_PIPELINED
from dynrt.runtime.http.transport.server import HttpServer
from dynrt.runtime.requests import GenerateOutput

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

Connect = Callable[[], Awaitable[RawConnection]]


async def eventually(event: asyncio.Event) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await event.wait()


async def test_headers_and_framing_of_a_stream(connect: Connect) -> None:
    connection = await connect()
    connection.send(http_request(CHAT, chat(stream=True), "X-Request-Id: req-1", "Connection: close"))
    head = (await connection.until(b"\r\n\r\n")).decode()
    for line in (
        "HTTP/1.1 200 OK",
        "Content-Type: text/event-stream; charset=utf-8",
        "Cache-Control: no-cache",
        "X-Accel-Buffering: no",
        "X-Request-Id: req-1",
        "Transfer-Encoding: chunked",
    ):
        assert line in head
    *chunks, end = (await connection.rest()).split(b"\r\n")[1::2]
    assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks)
    assert len(chunks) == 3, "what came at once is one chunk: the finish goes with usage and [DONE]"
    assert chunks[-1].endswith(b"data: [DONE]\n\n")
    assert end == b""


@pytest.mark.parametrize("keep_alive", [[], ["Connection: keep-alive"]])
async def test_an_http_1_0_stream_ends_with_its_connection(connect: Connect, keep_alive: list[str]) -> None:
    connection = await connect()
    connection.send(http_request(TEXT, text(stream=True), *keep_alive, version="1.0"))
    head = await connection.until(b"\r\n\r\n")
    assert b"chunked" not in head.lower()
    assert events_of(await connection.rest())[-1] == "[DONE]"


async def test_pipelined_requests_are_answered_in_order(connect: Connect, backend: ScriptedBackend) -> None:
    gate = asyncio.Event()
    backend.script = [gate, GenerateOutput([1], "x", "stop")]
    connection = await connect()
    ids = ["X-Request-Id: first"], ["X-Request-Id: second"]
    connection.send(http_request(TEXT, text(), *ids[0]) + http_request(CHAT, chat(), *ids[1]))
    await eventually(backend.entered)
    gate.set()
    assert [(await connection.response())[1]["x-request-id"] for _ in ids] == ["first", "second"]


async def test_more_pipelined_requests_than_wait_at_once_are_all_answered(connect: Connect) -> None:
    ids = [f"X-Request-Id: {number}" for number in range(3 * MAX_PIPELINED)]
    connection = await connect()
    connection.send(b"".join(http_request(TEXT, text(), one) for one in ids))
    assert [f"X-Request-Id: {(await connection.response())[1]['x-request-id']}" for _ in ids] == ids


async def test_bodies_that_came_late_take_no_places_of_pipelined_requests(connect: Connect) -> None:
    head, body = http_request(TEXT, text(), "Expect: 100-continue").split(b"\r\n\r\n")
    connection = await connect()
    for _ in range(MAX_PIPELINED + 2):
        connection.send(head + b"\r\n\r\n")
        await connection.until(b" 100 Continue\r\n\r\n")
        connection.send(body)
        assert (await connection.response())[0] == 200
    connection.send(http_request(TEXT, text()) * 2)
    assert [(await connection.response())[0] for _ in range(2)] == [200, 200]


async def test_an_upgrade_is_not_taken_up_and_what_follows_is_http(connect: Connect) -> None:
    upgrade = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    connection = await connect()
    connection.send(upgrade + upgrade + http_request(TEXT, text()))
    assert [(await connection.response())[0] for _ in range(3)] == [200, 200, 200]


async def test_head_is_answered_without_a_body(connect: Connect) -> None:
    connection = await connect()
    connection.send(b"HEAD /live HTTP/1.1\r\nHost: x\r\n\r\n")
    head = await connection.until(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ") and b"Content-Length: 15\r\n" in head
    connection.send(http_request(TEXT, text()))
    assert (await connection.response())[0] == 200


async def test_an_http_1_0_connection_is_kept_only_if_asked(connect: Connect) -> None:
    connection = await connect()
    for _ in range(2):
        connection.send(http_request(TEXT, text(), "Connection: keep-alive", version="1.0"))
        status, headers, _body = await connection.response()
        assert (status, headers["connection"]) == (200, "keep-alive")
    connection.send(http_request(TEXT, text(), version="1.0"))
    assert (await connection.rest()).startswith(b"HTTP/1.0 200 ")


BAD_REQUESTS = [
    (http_request(CHAT, b"{"), 400),
    (http_request(CHAT, {"messages": []}), 400),
    (http_request(CHAT, chat(model="gpt")), 404),
    (http_request("/v1/nowhere", {"input": "x"}), 404),
    (http_request("/v1/models", {}), 405),
    (http_request(CHAT, b"x" * 300_000, content_type="text/plain"), 415),
]


@pytest.mark.parametrize(("bad", "status"), BAD_REQUESTS)
async def test_a_connection_is_good_after_a_4xx(connect: Connect, bad: bytes, status: int) -> None:
    connection = await connect()
    connection.send(bad)
    assert (await connection.response())[0] == status
    connection.send(http_request(TEXT, text()))
    assert (await connection.response())[0] == 200


async def test_expect_continue(connect: Connect) -> None:
    head, body = http_request(TEXT, text(), "Expect: 100-continue").split(b"\r\n\r\n")
    connection = await connect()
    connection.send(head + b"\r\n\r\n")
    assert await connection.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.send(body)
    assert (await connection.response())[0] == 200


async def test_expect_continue_is_refused_by_the_headers_alone(connect: Connect) -> None:
    connection = await connect()
    too_large = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: 20000000\r\nExpect: 100-continue\r\n\r\n"
    connection.send(too_large.encode())
    status, _headers, body = await connection.response()
    assert status == 413 and "bytes" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [(b"a b\tc", "abc"), (b"caf\xe9-1", "caf-1"), ("漢x".encode(), "x"), (b"y" * 500, "y" * 128)],
)
async def test_a_request_id_is_made_visible_ascii(connect: Connect, sent: bytes, echoed: str) -> None:
    connection = await connect()
    connection.send(b"GET /nowhere HTTP/1.1\r\nHost: x\r\nX-Request-Id: " + sent + b"\r\n\r\n")
    assert (await connection.response())[1]["x-request-id"] == echoed


async def test_garbage_is_a_400(connect: Connect) -> None:
    connection = await connect()
    connection.send(b"\x16\x03\x01\x02\x00 not http\r\n\r\n")
    assert (await connection.rest()).split()[1] == b"400"


async def test_a_bad_chunk_size_is_a_400(connect: Connect) -> None:
    connection = await connect()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    connection.send(head + b"3\r\n{}toolong\r\n0\r\n\r\n")
    assert (await connection.rest()).split()[1] == b"400"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token_cancels(
    connect: Connect, backend: ScriptedBackend, stream: bool
) -> None:
    backend.script = [asyncio.Event()]
    connection = await connect()
    connection.send(http_request(CHAT, chat(stream=stream)))
    await eventually(backend.entered)
    assert not backend.closed.is_set()
    connection.abort()
    await eventually(backend.closed)


@pytest.mark.parametrize("step", [[], [asyncio.Event]])
async def test_a_client_that_leaves_in_mid_stream_cancels(
    connect: Connect, backend: ScriptedBackend, step: list[type[asyncio.Event]]
) -> None:
    """Both while the next token is awaited and while tokens come."""
    waits = [make() for make in step]
    backend.script = endless(GenerateOutput([1], "x"), waits)
    connection = await connect()
    connection.send(http_request(CHAT, chat(stream=True)))
    await connection.until(b"\n\n")
    connection.abort()
    await eventually(backend.closed)


def endless(output: GenerateOutput, waits: list[asyncio.Event]) -> Iterator[GenerateOutput | asyncio.Event]:
    yield output
    yield from waits
    yield from itertools.repeat(output)


async def test_a_silent_stream_is_pinged(
    connect: Connect, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.02)
    gate = asyncio.Event()
    backend.script = [GenerateOutput([1], "a"), gate, GenerateOutput([2], "b", "stop")]
    connection = await connect()
    connection.send(http_request(TEXT, text(stream=True), version="1.0"))
    before_pings = (await connection.until(b": ping\n\n")).split(b"\r\n\r\n")[1]
    gate.set()
    *chunks, done = events_of(before_pings + await connection.rest())
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b"] and done == "[DONE]"


async def test_a_reader_that_stalls_holds_back_only_itself_and_is_cut_off(
    connect: Connect, server: HttpServer, backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.2)
    monkeypatch.setattr(sse, "STALL_S", 0.4)
    blocks = Blocks(8192)
    backend.script = blocks
    with closing(socket.socket()) as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        stalled.sendall(http_request(TEXT, text(stream=True), "X-Request-Id: stalled"))
        await eventually(backend.entered)
        backend.script = [GenerateOutput([1], "x", "stop")]
        other = await connect()
        other.send(http_request(TEXT, text()))
        assert (await other.response())[0] == 200
        async with asyncio.timeout(DEADLINE_S):
            while await backend.closings.get() != "stalled":
                pass
    assert blocks.made * 8192 < 2**20, "kernel and server together buffered too much for one reader"


class Blocks:
    """Endless outputs of `chars` characters; counts those that were taken."""

    def __init__(self, chars: int) -> None:
        self._output = GenerateOutput([1], "x" * chars)
        self.made = 0

    def __iter__(self) -> Iterator[GenerateOutput]:
        while True:
            self.made += 1
            yield self._output
