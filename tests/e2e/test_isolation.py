"""What one runtime may not do to the machine: leave engines behind, disturb another runtime, listen to the network."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest
from live_server import Command, client_of, command, complete, eventually, prompt, serving
from process_tree import descendants, is_alive, listening, orphaned_shared_memory, shared_memory_of

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


# In each engine process, as the engine starts: a child in its process group that would outlive it.
GRANDCHILD = """
import subprocess, sys
if "--lifeline" in sys.orig_argv:
    subprocess.Popen(["sleep", "600"])
"""


async def test_no_engine_outlives_its_runtime(tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(GRANDCHILD)
    environment = {"PYTHONPATH": str(tmp_path)}
    async with serving(tmp_path / "log", tiny_model_dir, environment=environment) as server:
        family = descendants(server.pid)
        assert len(family) == 4, "two engines with a child each"
        shm = shared_memory_of(family)
        await runtime_killed(server, family)
    await eventually(lambda: shm.isdisjoint(orphaned_shared_memory()))


async def test_no_engine_outlives_a_runtime_killed_during_the_start(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    async with command(tmp_path / "log", "serve", tiny_model_dir, "--port", 0) as server:
        await eventually(lambda: len(descendants(server.pid)) == 2)
        await runtime_killed(server, descendants(server.pid))


async def runtime_killed(server: Command, family: set[int]) -> None:
    server.signal(signal.SIGKILL)
    ended_s = await eventually(lambda: not any(map(is_alive, family)))
    print(f"engines ended {ended_s:.3f} s after their runtime")


async def test_two_runtimes_do_not_disturb_each_other(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        starts = [
            stack.enter_async_context(
                serving(tmp_path / name, tiny_model_dir, "--local-prefill", "never", "--threads", 1)
            )
            for name in ("doomed", "other")
        ]
        doomed, other = await asyncio.gather(*starts)
        doomed_session = await stack.enter_async_context(client_of(doomed.url))
        session = await stack.enter_async_context(client_of(other.url))
        prompts = [prompt(300, seed) for seed in range(8)]
        alone = [await complete(session, one, 100, cache_salt="alone") for one in prompts]
        doomed_streams = [asyncio.create_task(complete(doomed_session, one, 1500)) for one in prompts]
        streams = [asyncio.create_task(complete(session, one, 100)) for one in prompts]
        await eventually(lambda: has_open_requests(doomed_session))
        await eventually(lambda: has_open_requests(session))
        assert_local_only({doomed.pid, other.pid} | descendants(doomed.pid) | descendants(other.pid))
        assert not any(stream.done() for stream in doomed_streams)
        doomed.signal(signal.SIGKILL)
        assert await asyncio.gather(*streams) == alone
        await asyncio.gather(*doomed_streams, return_exceptions=True)
        assert "worker lost" not in other.log and "request moves" not in other.log


async def has_open_requests(session: aiohttp.ClientSession) -> bool:
    async with session.get("/metrics") as response:
        return "dynrt_open_requests 8.0" in await response.text()


def assert_local_only(pids: set[int]) -> None:
    """They listen, NIXL's and UCX's own sockets included, and nowhere but on loopback."""
    sockets = listening(pids)
    assert sockets, "at least the endpoints listen"
    outward = [socket for socket in sockets if not ipaddress.ip_address(socket.address).is_loopback]
    assert not outward


async def test_a_prompt_is_never_logged(tiny_model_dir: Path, tmp_path: Path) -> None:
    secret = "the-vault-opens-at-nine"
    async with serving(tmp_path / "log", tiny_model_dir) as server, client_of(server.url) as session:
        chat = {"messages": [{"role": "user", "content": secret}], "max_tokens": 4}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", {**chat, "stream": True}),
            ("/v1/chat/completions", {**chat, "max_tokens": 10**6}),
            ("/v1/completions", {"prompt": secret, "temperature": secret}),
            ("/v1/completions", {"prompt": secret * 1000}),
        ):
            async with session.post(path, json=body) as response:
                await response.read()
        async with session.post("/v1/completions", data=b'{"prompt": "' + secret.encode()) as response:
            await response.read()
        os.kill(min(descendants(server.pid)), signal.SIGKILL)  # and what is logged of failures
        await server.logged("worker lost")
        assert server.log.count(" path=/v1/") == 6
        assert secret not in server.log
