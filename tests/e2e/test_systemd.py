"""What systemd hears of `dynrt serve` and of an engine that has joined it, when both are services of their own."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from live_server import command, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

DEADLINE_S = 60.0


class Systemd:
    """The end of NOTIFY_SOCKET that systemd keeps for one service."""

    def __init__(self, path: Path, receiver: socket.socket) -> None:
        self.environment = {"NOTIFY_SOCKET": str(path)}
        self._receiver = receiver

    async def hears(self) -> str:
        """The next notice."""
        async with asyncio.timeout(DEADLINE_S):
            return (await asyncio.get_running_loop().sock_recv(self._receiver, 4096)).decode()

    def has_heard_all(self) -> bool:
        with pytest.raises(BlockingIOError):
            self._receiver.recv(4096)
        return True


@contextmanager
def systemd(path: Path) -> Iterator[Systemd]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.setblocking(False)
        yield Systemd(path, receiver)


async def test_runtime_and_engine_as_services(tiny_model_dir: Path, tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/control"
    arguments = (tiny_model_dir, "--prefill", 0, "--decode", 1, "--control", address)
    engine = ("engine", tiny_model_dir, "--join", address, "--role", "prefill", "--dtype", "float32")
    with systemd(tmp_path / "runtime") as of_runtime, systemd(tmp_path / "engine") as of_engine:
        async with (
            command(tmp_path / "engine.log", *engine, environment=of_engine.environment) as joined,
            serving(tmp_path / "log", *arguments, environment=of_runtime.environment) as server,
        ):
            assert await of_runtime.hears() == f"READY=1\nSTATUS=dynrt serves llama at {server.url}"
            assert re.fullmatch(r"READY=1\nSTATUS=registered as prefill-\w+", await of_engine.hears())
            joined.signal(signal.SIGTERM)
            assert await of_engine.hears() == "STOPPING=1\nSTATUS=draining"
            assert await joined.status() == 0
            server.signal(signal.SIGINT)
            assert await of_runtime.hears() == "STOPPING=1\nSTATUS=draining"
            assert await server.status() == 0
        assert of_runtime.has_heard_all() and of_engine.has_heard_all(), "spawned engines say nothing"
