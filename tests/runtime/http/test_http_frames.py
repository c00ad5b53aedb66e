"""Ready events: what a client sees is the same whoever made them, and a slow reader gets them in order."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import closing
from typing import Any

import pytest
from scripted_backend import RawConnection, ScriptedBackend, chat, events_of, http_request, text

from dynrt.runtime.frame_sink import FrameSink
from dynrt.runtime.http.transport.server import HttpServer
from dynrt.runtime.requests import GenerateOutput, GenerateRequest

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

Connect = Callable[[], Awaitable[RawConnection]]


class FramingBackend(ScriptedBackend):
    """Makes events as an engine does; the sink gets what it takes, the generator yields the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = 0
        self.refused = asyncio.Event()
        self.late: tuple[bytes, int] | None = None  # brought when the request has been cut off
        self.late_taken: list[bool] = []
        self.left = asyncio.Event()

    async def generate(
        self, request: GenerateRequest, sink: FrameSink | None = None
    ) -> AsyncGenerator[GenerateOutput, None]:
        try:
            async for output in self._framed(request, sink):
                yield output
        finally:
            if self.late is not None and sink is not None:
                self.late_taken.append(sink.descriptor is not None or sink.take(*self.late))
            self.left.set()

    async def _framed(
        self, request: GenerateRequest, sink: FrameSink | None
    ) -> AsyncGenerator[GenerateOutput, None]:
        async for output in super().generate(request):
            if request.frame is None or not output.text:
                yield output
                continue
            frames, chunk = request.frame.around(output.text), request.frame.chunk(output.text)
            is_last = output.finish_reason is not None
            if sink is not None and not is_last and sink.take(chunk, output.token_ids[0]):
                self.taken += 1
                await asyncio.sleep(0)
                continue
            self.refused.set()
            yield GenerateOutput(
                output.token_ids, "", output.finish_reason, output.stop_reason, frames=frames
            )


@pytest.fixture
def backend() -> FramingBackend:
    return FramingBackend()


SCRIPT = [
    GenerateOutput([1], "Hé"),
    GenerateOutput([2], '"\n'),
    GenerateOutput([3], ""),
    GenerateOutput([4], "x"),
    GenerateOutput([5], "y", "stop", "END"),
]


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat), (TEXT, text)])
async def test_ready_events_read_like_our_own(
    connect: Connect, backend: FramingBackend, version: str, path: str, body: Callable[..., dict[str, Any]]
) -> None:
    backend.script = SCRIPT
    connection = await connect()
    asked = body(stream=True, stream_options={"include_usage": True})
    connection.send(http_request(path, asked, "Connection: close", version=version))
    await connection.until(b"\r\n\r\n")
    *chunks, usage, done = events_of(unframed(await connection.rest(), version))
    pieces = [choice.get("text", choice.get("delta", {}).get("content", "")) for choice in choices_of(chunks)]
    assert "".join(pieces) == 'Hé"\nxy' and done == "[DONE]"
    assert choices_of(chunks)[-1]["finish_reason"] == "stop"
    assert usage["usage"]["completion_tokens"] == 5
    assert (backend.taken >= 1) == (version == "1.1"), "HTTP/1.0 has no chunks"
    assert len({json.dumps([c["id"], c["created"], c["model"]]) for c in chunks}) == 1


def choices_of(chunks: list[Any]) -> list[dict[str, Any]]:
    return [choice for chunk in chunks for choice in chunk["choices"]]


def unframed(body: bytes, version: str) -> bytes:
    """Without the chunks of HTTP/1.1, each checked for its length."""
    if version == "1.0":
        return body
    data = b""
    while True:
        size, _, rest = body.partition(b"\r\n")
        data += rest[: int(size, 16)]
        assert rest[int(size, 16) :].startswith(b"\r\n")
        body = rest[int(size, 16) + 2 :]
        if size == b"0":
            assert body == b""
            return data


async def test_continuous_usage_needs_events_of_our_own(connect: Connect, backend: FramingBackend) -> None:
    backend.script = SCRIPT
    connection = await connect()
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = http_request(CHAT, chat(stream=True, stream_options=options), "Connection: close")
    connection.send(request)
    await connection.until(b"\r\n\r\n")
    *chunks, _ = events_of(unframed(await connection.rest(), "1.1"))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks][-1] == 5
    assert backend.taken == 0


async def test_a_slow_reader_gets_everything_in_order(server: HttpServer, backend: FramingBackend) -> None:
    count = 200
    backend.script = numbered(count)
    with closing(socket.socket()) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", int(server.url.rpartition(":")[2])))
        await loop.sock_sendall(slow, http_request(TEXT, text(stream=True), "Connection: close"))
        await backend.refused.wait()
        received = b""
        while piece := await loop.sock_recv(slow, 65536):
            received += piece
    *chunks, done = events_of(unframed(received.partition(b"\r\n\r\n")[2], "1.1"))
    told = "".join(choice["text"] for choice in choices_of(chunks))
    assert told.split() == [str(number) * 2000 for number in range(count)] and done == "[DONE]"
    assert backend.taken > 0


def numbered(count: int) -> Iterator[GenerateOutput]:
    yield GenerateOutput([0], "")
    for number in range(count):
        last = "length" if number == count - 1 else None
        yield GenerateOutput([number], f"{str(number) * 2000} ", last)


async def test_events_that_come_late_never_reach_the_descriptor_of_a_lost_connection(
    connect: Connect, backend: FramingBackend
) -> None:
    """It may be another client's by then; the request's own task ends only later."""
    backend.late = (b"late", 9)
    backend.script = [GenerateOutput([1], "a"), asyncio.Event()]
    connection = await connect()
    connection.send(http_request(CHAT, chat(stream=True)))
    await connection.until(b"\n\n")
    connection.abort()
    async with asyncio.timeout(10):
        await backend.left.wait()
    assert backend.late_taken == [False]
