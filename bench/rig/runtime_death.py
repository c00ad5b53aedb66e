"""A runtime killed with a request under way: what becomes of its engines, and how soon the next one serves."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import msgspec

from dynrt.runtime.spawner import dynrt_command
from rig.live_runtime import seconds_until

LIMIT_S = 120.0
ENGINE = ("--dtype", "float32", "--threads", "1", "--kv-blocks", "1024")
PROMPT_IDS = [5 + position % 200 for position in range(300)]


class Aftermath(msgspec.Struct, frozen=True):
    """Seconds, and whether all answers were right."""

    engines_gone_s: float | None  # since the death; None: they joined, and stay
    answered_s: float  # the next runtime's first answer, since it said that it was ready
    started_s: float  # since the next runtime was started
    memory_s: float  # until no engine holds a block, since then
    is_right: bool


async def kill_with_engines(model: Path) -> Aftermath:
    """Engines that the runtime has started."""
    async with _serving(model, *ENGINE, "--local-prefill", "never") as (process, port):
        expected = await _complete(port, 8)
        engines = _children(process.pid)
        killed_at = await _kill_in_mid_stream(process, port)
        await seconds_until(lambda: not any(map(_is_alive, engines)), LIMIT_S)
        gone_s = time.monotonic() - killed_at
    return await _next(model, (*ENGINE, "--local-prefill", "never"), expected, gone_s)


async def kill_before_joined_engines(model: Path, directory: Path) -> Aftermath:
    """Engines that joined by themselves: the same ones serve for the next runtime at the address."""
    address = f"ipc://{directory}/control-{time.monotonic_ns()}"
    arguments = ("--prefill", "0", "--decode", "0", "--control", address, "--local-prefill", "never")
    async with AsyncExitStack() as stack:
        for role in ("prefill", "decode"):
            await stack.enter_async_context(_engine(model, address, role))
        async with _serving(model, *arguments) as (process, port):
            await seconds_until(lambda: _num_workers(port, 2), LIMIT_S)
            expected = await _complete(port, 8)
            await _kill_in_mid_stream(process, port)
        return await _next(model, arguments, expected, None)


async def _next(model: Path, arguments: tuple[str, ...], expected: str, gone_s: float | None) -> Aftermath:
    began_at = time.monotonic()
    async with _serving(model, *arguments) as (_, port):
        ready_at = time.monotonic()
        await seconds_until(lambda: _num_workers(port, 2), LIMIT_S)
        answer = await _complete(port, 8)
        answered_at = time.monotonic()
        memory_s = await seconds_until(lambda: _holds_nothing(port), LIMIT_S)
    return Aftermath(gone_s, answered_at - ready_at, ready_at - began_at, memory_s, answer == expected)


async def _kill_in_mid_stream(process: Process, port: int) -> float:
    """While decode goes on with an answer that would be long. Returns when."""
    reader, writer = await _post(port, 1500, stream=True)
    for _ in range(5):
        await reader.readuntil(b"data: ")
    killed_at = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    with suppress(ConnectionError):
        await reader.read()  # until its end
    writer.close()
    await process.wait()
    return killed_at


# --- processes ------------------------------------------------------------------------------------


@asynccontextmanager
async def _serving(model: Path, *arguments: str) -> AsyncIterator[tuple[Process, int]]:
    """`dynrt serve`, ready, and its port."""
    command = (*dynrt_command(), "serve", str(model), "--port", "0", *arguments)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=DEVNULL)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            line = (await process.stdout.readline()).decode()
        yield process, int(line.rpartition(":")[2])
    finally:
        await _end(process)


@asynccontextmanager
async def _engine(model: Path, address: str, role: str) -> AsyncIterator[None]:
    command = (*dynrt_command(), "engine", str(model), "--join", address, "--role", role, *ENGINE)
    process = await asyncio.create_subprocess_exec(*command, stdout=DEVNULL, stderr=DEVNULL)
    try:
        yield
        assert process.returncode is None, f"the {role} engine that joined has ended"
    finally:
        await _end(process)


async def _end(process: Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    await process.wait()


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("X", "Z")
    except FileNotFoundError:
        return False


# --- requests -------------------------------------------------------------------------------------


async def _complete(port: int, max_tokens: int) -> str:
    reader, writer = await _post(port, max_tokens, stream=False)
    body = (await reader.read()).partition(b"\r\n\r\n")[2]
    writer.close()
    return str(json.loads(body)["choices"][0]["text"])


async def _post(
    port: int, max_tokens: int, *, stream: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A prompt that nothing cached shortens; the connection ends with the answer."""
    salt = str(time.monotonic_ns())
    body = {"prompt": PROMPT_IDS, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return await _send(
        port, "POST /v1/completions", json.dumps({**body, "cache_salt": salt, "stream": stream})
    )


async def _send(port: int, what: str, body: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{what} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    await writer.drain()
    return reader, writer


async def _metric(port: int, name: str) -> float:
    """The sum of all series that begin so."""
    reader, writer = await _send(port, "GET /metrics", "")
    text = (await reader.read()).decode()
    writer.close()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}.* (\S+)$", text, re.MULTILINE))


async def _num_workers(port: int, number: int) -> bool:
    return await _metric(port, "dynrt_workers{") == number


async def _holds_nothing(port: int) -> bool:
    return await _metric(port, 'dynrt_kv_blocks{state="active"') == 0
