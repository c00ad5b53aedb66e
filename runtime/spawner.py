"""Spawner: starts and watches engine processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Protocol

import msgspec

from dynrt.engines.config import EngineConfig


class Process(Protocol):
    """A running engine process."""

    pid: int

    async def exited(self) -> int:
        """Its exit status (negative: the signal that ended it), as soon as it has ended."""

    def kill(self) -> None:
        """End it and everything it started, now."""

    def release(self) -> None:
        """Watch it no longer, and let it run."""


class Spawner(Protocol):
    """Starts engine processes that register at `address` with `spawn_token`."""

    def spawn(self, config: EngineConfig, address: str, spawn_token: str) -> Process: ...

    def adopt(self, pid: int) -> Process:
        """Watch a process of this host that was started by somebody else."""


class PidfdProcess:
    """Watches a process through a pidfd: its end is seen at once, and its pid cannot be taken for another's."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._ended = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end)

    async def exited(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if not self._ended.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def release(self) -> None:
        if not self._ended.done():
            self._ended.cancel()
            self._close()

    def _on_end(self) -> None:
        self._close()
        self._ended.set_result(self._status())

    def _close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)

    def _status(self) -> int:
        return 0  # not our child: its status is not ours to know


class ChildProcess(PidfdProcess):
    """An engine process of ours: leader of its own process group, tied to us by the lifeline."""

    def __init__(self, popen: subprocess.Popen[bytes], lifeline: int) -> None:
        self._popen = popen
        self._lifeline = lifeline
        super().__init__(popen.pid)

    def kill(self) -> None:
        if not self._ended.done():
            self._kill_group()

    def _status(self) -> int:
        self._kill_group()  # whatever the engine started goes with it
        os.close(self._lifeline)
        return self._popen.wait()

    def _kill_group(self) -> None:
        # Not yet reaped, so the group id cannot have been given to anybody else.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class ProcessSpawner:
    """Runs `dynrt engine …`. The child holds the read end of a pipe whose write end only we have: its lifeline."""

    def spawn(self, config: EngineConfig, address: str, spawn_token: str) -> ChildProcess:
        read_end, write_end = os.pipe()
        arguments = ["engine", "--join", address, "--spawn-token", spawn_token, "--lifeline", str(read_end)]
        settings = msgspec.json.encode(config).decode()
        try:
            popen = subprocess.Popen(
                [*dynrt_command(), *arguments, "--settings", settings],
                stdin=subprocess.DEVNULL,
                pass_fds=(read_end,),
                start_new_session=True,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return ChildProcess(popen, write_end)

    def adopt(self, pid: int) -> PidfdProcess:
        return PidfdProcess(pid)


def dynrt_command() -> list[str]:
    """How to run the dynrt executable of this very environment."""
    script = Path(sysconfig.get_path("scripts")) / "dynrt"
    return [str(script)] if script.exists() else [sys.executable, "-P", "-m", "dynrt.runtime.cli"]
