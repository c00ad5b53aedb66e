"""A closed loop of HTTP clients in a process of its own: sends chat requests, checks every answer, accounts for CPU.

Reads one Load as JSON from its command line and prints one Outcome as JSON. The client is an asyncio protocol
without an HTTP library, so that it takes little of the machine that it shares with what it measures.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import cast

import msgspec
import uvloop

SYLLABLES = ("ka", "mo", "ti", "re", "su", "la", "no", "vi", "de", "pa", "go", "ne")
USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
TAIL_BYTES = 1024  # of a stream, in which its usage and its end are looked for


class Load(msgspec.Struct, frozen=True):
    """What to send, and whose CPU time to count. Prompts are fresh for every `seed`."""

    port: int
    model: str
    requests: int
    connections: int
    max_tokens: int
    stream: bool
    prompt_words: int = 6
    system_words: int = 0  # of them, in a system message that is the same in all requests
    warmup: int = 32  # requests before the count begins
    seed: int = 0
    pids: dict[str, list[int]] = {}  # process ids by label


class Outcome(msgspec.Struct, frozen=True):
    """Of the counted requests. `ttft_s`, `latency_s`: sorted; until the first event of a stream, and its end."""

    wall_s: float
    cpu_s: dict[str, float]  # by label, meanwhile
    rss_mb: dict[str, float]  # by label, afterwards; the sum of its processes
    ttft_s: list[float]
    latency_s: list[float]
    tokens: int
    reads: int  # a read that brings many events is cheaper for whoever sent them


class Client(asyncio.Protocol):
    """One connection, on which one request at a time is answered."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._done: asyncio.Future[None] = self._loop.create_future()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"the server closed the connection: {error}"))

    async def ask(self, request: bytes) -> int:
        """Send it and await all of the answer. Returns the tokens that its usage counts."""
        self._head, self._tail, self._missing = b"", b"", -1
        self.reads = 0
        self.first_at = 0.0
        self._done = self._loop.create_future()
        self.sent_at = time.perf_counter()
        self._transport.write(request)
        await self._done
        self.ended_at = time.perf_counter()
        if not self._head.startswith(b"HTTP/1.1 200"):
            raise ValueError(f"answer: {self._head + self._tail!r}")
        usage = USAGE.findall(self._tail)
        if not usage:
            raise ValueError(f"an answer without usage: {self._tail!r}")
        return int(usage[-1])

    def data_received(self, data: bytes) -> None:
        if self._done.done():
            return
        if b"\r\n\r\n" not in self._head:
            data = self._read_head(self._head + data)
        if data:
            self._read_body(data)

    def _read_head(self, data: bytes) -> bytes:
        """Returns what of the body came with it."""
        head, end, body = data.partition(b"\r\n\r\n")
        self._head = head + end
        length = re.search(rb"(?i)content-length: *(\d+)", head)
        self._missing = int(length[1]) if length else -1
        return body

    def _read_body(self, data: bytes) -> None:
        self.reads += 1
        self.first_at = self.first_at or time.perf_counter()
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._missing >= 0:
            self._missing -= len(data)
        if self._missing == 0 or (self._missing < 0 and self._tail.endswith(b"0\r\n\r\n")):
            self._done.set_result(None)


class Counts:
    """What was measured of the counted requests."""

    def __init__(self) -> None:
        self.ttft_s: list[float] = []
        self.latency_s: list[float] = []
        self.tokens = 0
        self.reads = 0

    def add(self, client: Client, tokens: int) -> None:
        self.ttft_s.append(client.first_at - client.sent_at)
        self.latency_s.append(client.ended_at - client.sent_at)
        self.tokens += tokens
        self.reads += client.reads


def requests_of(load: Load) -> list[bytes]:
    """The bytes of every request, made before the clock starts."""
    draw = random.Random(load.seed)
    system = _words(random.Random(7), load.system_words)
    return [
        _request(load, system, _words(draw, load.prompt_words - load.system_words))
        for _ in range(load.warmup + load.requests)
    ]


def _words(draw: random.Random, count: int) -> str:
    return " ".join("".join(draw.choices(SYLLABLES, k=2)) for _ in range(count))


def _request(load: Load, system: str, user: str) -> bytes:
    messages = [{"role": "system", "content": system}] if system else []
    body = {
        "model": load.model,
        "messages": [*messages, {"role": "user", "content": user}],
        "max_tokens": load.max_tokens,
        "ignore_eos": True,
        "stream": load.stream,
        **({"stream_options": {"include_usage": True}} if load.stream else {}),
    }
    raw = msgspec.json.encode(body)
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(raw), raw)
    )


async def run(load: Load) -> Outcome:
    """Raises ValueError for an answer that is not what was asked for."""
    loop = asyncio.get_running_loop()
    requests = requests_of(load)
    clients = [
        (await loop.create_connection(Client, "127.0.0.1", load.port))[1] for _ in range(load.connections)
    ]
    await _all(clients, iter(requests[: load.warmup]), load.max_tokens, Counts())
    counts = Counts()
    cpu_before = _sums(load, cpu_s)
    began_at = time.perf_counter()
    await _all(clients, iter(requests[load.warmup :]), load.max_tokens, counts)
    wall_s = time.perf_counter() - began_at
    used = {label: after - cpu_before[label] for label, after in _sums(load, cpu_s).items()}
    return Outcome(
        wall_s,
        used,
        _sums(load, rss_mb),
        sorted(counts.ttft_s),
        sorted(counts.latency_s),
        counts.tokens,
        counts.reads,
    )


async def _all(clients: list[Client], requests: Iterator[bytes], max_tokens: int, counts: Counts) -> None:
    """Every client takes the next request when it has its last answer."""

    async def work(client: Client) -> None:
        for request in requests:
            tokens = await client.ask(request)
            if tokens != max_tokens:
                raise ValueError(f"{max_tokens} tokens were asked for and {tokens} came")
            counts.add(client, tokens)

    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(work(client))


def _sums(load: Load, measure: Callable[[int], float]) -> dict[str, float]:
    return {label: sum(measure(pid) for pid in pids) for label, pids in load.pids.items()}


def cpu_s(pid: int) -> float:
    """User and system seconds of a process with all its threads, to the nanosecond; /proc has ticks of 10 ms."""
    return time.clock_gettime((~pid << 3) | 2)  # Linux's number for it, as clock_getcpuclockid(3) makes it


def rss_mb(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE") / 1e6


def main() -> None:
    load = msgspec.json.decode(sys.argv[1], type=Load)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.stdout.buffer.write(msgspec.json.encode(runner.run(run(load))))


if __name__ == "__main__":
    main()
