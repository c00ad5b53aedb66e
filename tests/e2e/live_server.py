"""Real runtimes for tests: embedded with their endpoint, or as `dynrt` commands; and clients for both."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from process_tree import descendants, is_alive

from dynrt.runtime import GenerateRequest, Runtime, RuntimeConfig, SamplingParams
from dynrt.runtime.errors import DynrtError
from dynrt.runtime.http.transport.server import HttpServer
from dynrt.runtime.messages import pack_ids
from dynrt.runtime.spawner import dynrt_command

START_S = 300.0  # engines import torch: 4 s each on an idle machine, far longer on a busy one
DEADLINE_S = 30.0  # for whatever has no limit of its own
POLL_S = 0.02

Condition = Callable[[], Any | Awaitable[Any]]
T = TypeVar("T")


async def eventually(condition: Condition, timeout_s: float = DEADLINE_S) -> float:
    """Await that `condition` (a function or coroutine function) is true; returns the seconds that took."""
    began = time.monotonic()
    while True:
        holds = await _is_met(condition)
        waited_s = time.monotonic() - began
        if holds:
            return waited_s
        assert waited_s < timeout_s, f"not within {timeout_s:g} s"
        await asyncio.sleep(POLL_S)


async def caught(
    condition: Condition, ask: Callable[[], Coroutine[Any, Any, T]], timeout_s: float = DEADLINE_S
) -> asyncio.Task[T]:
    """What `ask` does, caught while `condition` is true: if it ends before anybody has looked, it is asked once more.

    Work of 0.3 s takes no longer than a look at it, on a busy machine.
    """
    async with asyncio.timeout(timeout_s):
        while True:
            task = asyncio.create_task(ask())
            try:
                if await _is_met_during(task, condition):
                    return task
            except BaseException:
                task.cancel()
                raise
            await task


async def _is_met_during(task: asyncio.Task[Any], condition: Condition) -> bool:
    while not task.done():
        if await _is_met(condition):
            return True
        await asyncio.sleep(POLL_S)
    return False


async def _is_met(condition: Condition) -> Any:
    holds = condition()
    return await holds if inspect.isawaitable(holds) else holds


# --- an embedded runtime ----------------------------------------------------------------------------


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids of text that the tiny model's tokenizer could have made, without special tokens."""
    draw = random.Random(seed)
    return [draw.randrange(5, 250) for _ in range(num_tokens)]


def greedy(token_ids: list[int], max_tokens: int, **fields: Any) -> GenerateRequest:
    return GenerateRequest(
        pack_ids(token_ids), SamplingParams(max_tokens, temperature=0.0, ignore_eos=True), **fields
    )


async def tokens_of(runtime: Runtime, request: GenerateRequest) -> list[int]:
    """What `request` generates, to its end."""
    token_ids: list[int] = []
    async for output in runtime.generate(request):
        token_ids += output.token_ids
    return token_ids


async def outcome_of(runtime: Runtime, request: GenerateRequest) -> list[int] | DynrtError:
    """The same, or the error that ended it."""
    try:
        return await tokens_of(runtime, request)
    except DynrtError as error:
        return error


async def is_clean(runtime: Runtime) -> bool:
    """Nothing is open or waiting in the runtime, and no worker holds a block, a handoff or a request."""
    if not runtime.idle():
        return False
    statuses = (await runtime.status()).values()
    return not any(
        status.requests
        or status.open_handoffs
        or status.load.blocks_active
        or status.load.running_requests
        or status.load.waiting_requests
        for status in statuses
    )


class Embedded:
    """A runtime in this process, and where its endpoint is."""

    def __init__(self, runtime: Runtime, url: str) -> None:
        self.runtime = runtime
        self.url = url


@asynccontextmanager
async def embedded(config: RuntimeConfig) -> AsyncIterator[Embedded]:
    runtime = Runtime(config)
    server = HttpServer(runtime)
    await server.start(port=0)
    try:
        async with runtime:
            yield Embedded(runtime, server.url)
            await server.stop(0.0)
    finally:
        await server.stop(0.0)


# --- `dynrt` commands -------------------------------------------------------------------------------


class Command:
    """A running `dynrt` command: its one line, its log, its end."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self.url = ""

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text()

    def engine_pids(self) -> set[int]:
        return descendants(self.pid)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def line(self, timeout_s: float = START_S) -> str:
        """The next line on standard output; empty at its end."""
        assert self._process.stdout is not None
        async with asyncio.timeout(timeout_s):
            return (await self._process.stdout.readline()).decode()

    async def ready(self) -> None:
        line = await self.line()
        assert line, f"ended before it was ready:\n{self.log}"
        self.url = line.split()[-1]

    async def logged(self, text: str, timeout_s: float = START_S) -> None:
        await eventually(lambda: text in self.log, timeout_s)

    async def status(self, timeout_s: float = DEADLINE_S) -> int:
        """Its exit status, once it has ended."""
        async with asyncio.timeout(timeout_s):
            return await self._process.wait()

    async def kill_all(self) -> None:
        """It and everything below it, if still there."""
        pids = descendants(self.pid) | {self.pid} if self._process.returncode is None else set()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await self.status()
        assert self._process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            await self._process.stdout.read()  # to its end: nobody is left who could write to it
        await eventually(lambda: not any(map(is_alive, pids)))


@asynccontextmanager
async def command(
    log: Path, *arguments: object, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Command]:
    """`dynrt ARGUMENTS…` with its standard error in the file `log`; killed at the end if still running."""
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *dynrt_command(),
            *map(str, arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    running = Command(process, log)
    try:
        yield running
    finally:
        await running.kill_all()


@asynccontextmanager
async def serving(log: Path, *arguments: object, **options: Any) -> AsyncIterator[Command]:
    """`dynrt serve --port 0 --dtype float32 ARGUMENTS…`, ready: its greedy answers do not depend on batching."""
    async with command(log, "serve", "--port", 0, "--dtype", "float32", *arguments, **options) as server:
        await server.ready()
        yield server


# --- clients ----------------------------------------------------------------------------------------


def client_of(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        url, timeout=aiohttp.ClientTimeout(60), connector=aiohttp.TCPConnector(limit=0)
    )


async def metrics_of(session: aiohttp.ClientSession) -> dict[str, float]:
    """The samples of /metrics by name and labels, as `dynrt_requests_total{outcome="cancelled"}`."""
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    samples = [line.rpartition(" ") for line in lines if not line.startswith("#")]
    return {name: float(value) for name, _, value in samples}


def holds_nothing(metrics: Mapping[str, float]) -> bool:
    """No request is open, no handoff either, and no engine has a request or blocks that are in use."""
    of_engines = ('state="active"', 'state="running"', 'state="waiting"')
    held = [
        value
        for name, value in metrics.items()
        if name in ("dynrt_open_requests", "dynrt_open_handoffs")
        or (
            name.startswith(("dynrt_kv_blocks", "dynrt_worker_requests")) and any(map(name.count, of_engines))
        )
    ]
    assert len(held) > 2, "the metrics have other names"
    return not any(held)


def completion(token_ids: list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
    """The body of a greedy completion that generates just so many tokens."""
    body = {"prompt": token_ids, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**body, **fields}


async def texts_of(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """The pieces of a streamed completion as they come, to its [DONE]. AssertionError for an error event."""
    async for line in response.content:
        data = line.decode().removeprefix("data: ").strip()
        if data == "[DONE]":
            return
        if data and not data.startswith(":"):
            event = json.loads(data)
            assert "error" not in event, event
            for choice in event["choices"]:
                yield choice["text"]
    raise AssertionError("the stream ended without [DONE]")


async def complete(
    session: aiohttp.ClientSession, token_ids: list[int], max_tokens: int, **fields: Any
) -> str:
    """The text of a streamed greedy completion."""
    body = completion(token_ids, max_tokens, stream=True, **fields)
    async with session.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return "".join([text async for text in texts_of(response)])
