"""Many connections at once: idle ones, and streams that note when their tokens come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from typing import cast

import msgspec

HOST = "127.0.0.1"
GET_LIVE = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def post_chat(text: str, max_tokens: int) -> bytes:
    """A streamed chat that generates exactly so many tokens."""
    body = msgspec.json.encode(
        {
            "messages": [{"role": "user", "content": text}],
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
    )
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )


class Connection(asyncio.Protocol):
    """One connection; what came on it, and when."""

    def __init__(self) -> None:
        self.arrived_s: list[float] = []
        self.head = b""
        self.closed = False
        self.answered = asyncio.Event()

    @classmethod
    async def open(cls, port: int) -> Connection:
        _, protocol = await asyncio.get_running_loop().create_connection(cls, HOST, port)
        return protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        self.arrived_s.append(time.perf_counter())
        self.head = self.head or data[:200]
        self.answered.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.answered.set()

    async def ask(self, request: bytes, limit_s: float) -> int:
        """Send it and await the beginning of the answer. Returns its status, 0 if the connection was closed."""
        if self.closed:
            return 0
        self.answered.clear()
        self.head = b""
        self.transport.write(request)
        async with asyncio.timeout(limit_s):
            await self.answered.wait()
        return int(self.head.split(b" ", 2)[1]) if self.head else 0


async def open_many(port: int, requests: Iterable[bytes], limit_s: float) -> list[Connection]:
    """A connection for each request, which it has sent; answered with 200. Raises ValueError if one is not."""
    connections = []
    for request in requests:
        connections.append(await Connection.open(port))
        connections[-1].transport.write(request)
    async with asyncio.timeout(limit_s):
        for connection in connections:
            await connection.answered.wait()
            if not connection.head.startswith(b"HTTP/1.1 200"):
                raise ValueError(f"answer: {connection.head!r}")
    return connections
