"""Offload: where blocking work such as tokenising runs, so that the event loop never waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

T = TypeVar("T")


class Offload(Protocol):
    """Runs a blocking function elsewhere."""

    async def run(self, function: Callable[[], T]) -> T: ...

    def close(self) -> None: ...


class ThreadOffload:
    """A small pool of threads: tokenizers release the GIL."""

    def __init__(self, threads: int = 2) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dynrt-offload")

    async def run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class InlineOffload:
    """Runs at once: for virtual time, where threads would not be deterministic."""

    async def run(self, function: Callable[[], T]) -> T:
        return function()

    def close(self) -> None:
        pass
