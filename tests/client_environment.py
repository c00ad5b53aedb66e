"""Virtual environments for clients that nobody here wrote, built once and kept in the user's cache directory."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._,-]+\])?==[0-9][A-Za-z0-9.!+_-]*")
ERROR_CHARS = 2000
LOCK_POLL_S = 0.1
CALL_S = 90.0  # for a command of a client


class ClientEnvironmentError(Exception):
    """The environment cannot be built."""


def client_python(
    name: str,
    requirements: Sequence[str],
    *,
    without: Sequence[str] = (),
    resolve: bool = True,
    deadline_s: float = 300.0,
) -> Path:
    """The interpreter of a virtual environment that holds exactly `requirements` and what they need.

    `without` names distributions that come with the requirements and are removed again, since they break
    what they came with. With `resolve` False nothing but `requirements` is installed, for those that declare what
    cannot be installed and is not needed. Every requirement must be pinned (`openai==3.57.0`), so that a kept environment
    cannot be out of date.
    Processes that ask for the same environment at once build it once. Raises ClientEnvironmentError if a
    requirement is not pinned, pip fails, or the environment is not there within `deadline_s` seconds.
    """
    _refuse_unpinned(requirements)
    deadline = time.monotonic() + deadline_s
    options = [] if resolve else ["--no-deps"]
    folder = _cache_folder() / f"{name}-{_fingerprint([*requirements, *options], without)}"
    with _locked(folder.with_suffix(".lock"), deadline):
        if not (folder / ".complete").exists():
            _build(folder, [*options, *requirements], without, deadline)
    return folder / "bin" / "python"


async def printed_by(*arguments: object) -> str:
    """The standard output of a command that succeeds."""
    process = await asyncio.create_subprocess_exec(
        *map(str, arguments), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(CALL_S):
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode == 0, stderr.decode()
    return stdout.decode()


def _refuse_unpinned(requirements: Sequence[str]) -> None:
    for requirement in requirements:
        if not PINNED.fullmatch(requirement):
            raise ClientEnvironmentError(
                f"requirement {requirement!r} is not pinned; write it as NAME==VERSION"
            )


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "dynrt" / "environments"


def _fingerprint(requirements: Sequence[str], without: Sequence[str]) -> str:
    """Names the environment: another set of requirements or another Python has another one."""
    parts = [sys.version, sys.executable, *sorted(requirements), *(f"-{name}" for name in sorted(without))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        while not _try_lock(lock.fileno()):
            if time.monotonic() > deadline:
                raise ClientEnvironmentError(
                    f"another process has held {path} for too long; end it and try again"
                )
            time.sleep(LOCK_POLL_S)
        yield


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _build(folder: Path, install: Sequence[str], without: Sequence[str], deadline: float) -> None:
    """Builds in place, since environments hold absolute paths; the file `.complete` comes last.

    `install`: requirements, and pip's options in front of them.
    """
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(folder)], deadline)
    pip = [str(folder / "bin" / "python"), "-m", "pip"]
    _run([*pip, "install", "--no-input", *install], deadline)
    if without:
        _run([*pip, "uninstall", "--yes", *without], deadline)
    (folder / ".complete").touch()


def _run(command: Sequence[str], deadline: float) -> None:
    """Runs to the end, or kills the command with all that it started."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise ClientEnvironmentError(f"{' '.join(command)} did not end within the deadline") from None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode != 0:
        raise ClientEnvironmentError(
            f"{' '.join(command)} ended with exit code {process.returncode}: {output[-ERROR_CHARS:]}"
        )
