"""A stand-in for an engine behind an HTTP router: answers chat requests with ready-made events, a token a step.

Runs in the project's environment: `sse_engine.py PORT STEP_S`. One protocol class without an HTTP library, so that
the router in front of it is the one that works.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, cast

import msgspec
import uvloop

ID = "chatcmpl-0123456789abcdef0123456789abcdef"
HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(choices: list[Any], **fields: Any) -> bytes:
    body = {
        "id": ID,
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "m",
        "choices": choices,
        **fields,
    }
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


TOKEN = chunked(event([{"index": 0, "delta": {"content": " token"}, "finish_reason": None}]))
FINISH = event([{"index": 0, "delta": {}, "finish_reason": "length"}])


def usage(max_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": max_tokens, "total_tokens": 1 + max_tokens}


class Engine:
    """All streams get their next token in the same step, as from a batch."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self.streams: dict[Connection, int] = {}  # tokens that are left

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._step_s, loop.time())
            await asyncio.sleep(due - loop.time())
            for connection, left in list(self.streams.items()):
                connection.give(left)


class Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        length = [
            int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
        ]
        num_bytes = length[0] if length else 0
        if not end or len(rest) < num_bytes:
            return
        self._buffer = rest[num_bytes:]
        body = rest[:num_bytes]
        self._answer(msgspec.json.decode(body) if head.startswith(b"POST") and body else None)

    def _answer(self, asked: dict[str, Any] | None) -> None:
        if asked is None:  # a probe
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
            )
            return
        self._max_tokens = asked["max_tokens"]
        self._transport.write(HEAD)
        self._engine.streams[self] = self._max_tokens

    def give(self, left: int) -> None:
        if left > 1:
            self._engine.streams[self] = left - 1
            self._transport.write(TOKEN)
            return
        del self._engine.streams[self]
        last = FINISH + event([], usage=usage(self._max_tokens)) + b"data: [DONE]\n\n"
        self._transport.write(TOKEN + chunked(last) + b"0\r\n\r\n")


async def main(port: int, step_s: float) -> None:
    loop = asyncio.get_running_loop()
    engine = Engine(step_s)
    server = await loop.create_server(lambda: Connection(engine), "127.0.0.1", port)
    async with server:
        await engine.run()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1]), float(sys.argv[2])))
