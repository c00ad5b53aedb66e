"""`dynrt serve` in a process of its own, and how much memory that takes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from dynrt.runtime.spawner import dynrt_command
from rig.http_load import rss_mb

START_S = 60.0
END_S = 40.0  # streams may take 30 s to end


class ServeCommand:
    """The runtime's process, what it serves and where it listens."""

    def __init__(self, process: asyncio.subprocess.Process, ready_line: str) -> None:
        self._process = process
        self.model = ready_line.split()[2]  # dynrt serves MODEL at http://HOST:PORT
        self.port = int(ready_line.rpartition(":")[2])

    @property
    def pid(self) -> int:
        return self._process.pid

    def rss_mb(self) -> float:
        return rss_mb(self.pid)


def serving_sim(model: Path | str, *arguments: object) -> AbstractAsyncContextManager[ServeCommand]:
    """With simulated engines."""
    return serving(model, "--engine", "sim", *arguments)


@asynccontextmanager
async def serving(*arguments: object) -> AsyncIterator[ServeCommand]:
    """Ready, without its log. Raises TimeoutError if it is not within START_S."""
    process = await asyncio.create_subprocess_exec(
        *dynrt_command(), "serve", *map(str, arguments), "--port", "0",
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            line = (await process.stdout.readline()).decode()
        if not line:
            raise RuntimeError("`dynrt serve` has ended before it was ready; run it by hand to see why")
        yield ServeCommand(process, line)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(END_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            print("`dynrt serve` had to be killed", file=sys.stderr)
