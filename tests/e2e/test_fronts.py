"""`dynrt serve --frontends 2`: one port, two processes; the loss of one costs only what it was serving."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from live_server import Command, client_of, complete, completion, eventually, prompt, serving, texts_of
from process_tree import descendants, is_alive

pytestmark = [pytest.mark.e2e]

SIM = ("--engine", "sim", "--sim-profile", "dynamo-mocker", "--prefill", 1, "--decode", 1, "--frontends", 2)
CONNECTIONS = 16  # the kernel deals them out by a hash: all to one front once in 32 thousand times
TOKENS = 150  # of 6 ms each


def front_pids(server: Command) -> set[int]:
    return {
        pid for pid in descendants(server.pid) if b"\0front\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


async def metric(session: aiohttp.ClientSession, name: str) -> float:
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


class Stream:
    """On a connection of its own."""

    def __init__(self, url: str, number: int) -> None:
        self.begun = asyncio.Event()
        self.task = asyncio.create_task(self._read(url, number))

    async def _read(self, url: str, number: int) -> str | None:
        """All of its text; None if the connection broke."""
        texts: list[str] = []
        body = completion(prompt(40, number), TOKENS, stream=True)
        try:
            async with client_of(url) as session, session.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                async for text in texts_of(response):
                    texts.append(text)
                    self.begun.set()
        except aiohttp.ClientError:
            return None
        return "".join(texts)


async def all_begun(streams: list[Stream]) -> None:
    await asyncio.gather(*(stream.begun.wait() for stream in streams))


async def test_a_front_is_killed(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with serving(tmp_path / "log", tiny_model_dir, *SIM) as server:
        before = front_pids(server)
        assert len(before) == 2
        streams = [Stream(server.url, number) for number in range(CONNECTIONS)]
        await all_begun(streams)
        os.kill(min(before), signal.SIGKILL)
        texts = [await stream.task for stream in streams]
        whole = [text for text in texts if text is not None]
        assert 0 < len(whole) < CONNECTIONS, "each front served some"
        assert all(whole)
        await eventually(lambda: len(front_pids(server)) == 2 and min(before) not in front_pids(server))
        async with client_of(server.url) as session:
            assert await complete(session, prompt(40), 8)
            await eventually(lambda: no_open_requests(session))


async def no_open_requests(session: aiohttp.ClientSession) -> bool:
    return await metric(session, "dynrt_open_requests") == 0


async def test_streams_of_all_fronts_are_finished_at_the_end(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with serving(tmp_path / "log", tiny_model_dir, *SIM) as server:
        family = descendants(server.pid)
        streams = [Stream(server.url, number) for number in range(CONNECTIONS)]
        await all_begun(streams)
        server.signal(signal.SIGTERM)
        assert all([await stream.task for stream in streams])
        assert await server.status() == 0, server.log
        await eventually(lambda: not any(map(is_alive, family)))


async def test_fronts_end_with_a_killed_runtime(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with serving(tmp_path / "log", tiny_model_dir, *SIM) as server:
        fronts = front_pids(server)
        server.signal(signal.SIGKILL)
        await eventually(lambda: not any(map(is_alive, fronts)))
