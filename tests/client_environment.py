"""Environments for clients that nobody here wrote, built once and kept in the user's cache directory."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9._,-]+\])?==[0-9][A-Za-z0-9.!+_-]*")
PINNED_NPM = re.compile(r"(@[a-z0-9._-]+/)?[a-z0-9][a-z0-9._-]*@[0-9][A-Za-z0-9.+-]*")
ERROR_CHARS = 2000
LOCK_POLL_S = 0.1
CALL_S = 90.0  # for a command of a client


class ClientEnvironmentError(Exception):
    """The environment cannot be built."""


def client_python(
    name: str,
    requirements: Sequence[str],
    *,
    resolve: bool = True,
    deadline_s: float = 300.0,
) -> Path:
    """The interpreter of a virtual environment that holds exactly `requirements` and what they need.

    With `resolve` False nothing but `requirements` is installed, for those that declare what cannot be installed and
    is not needed. Every requirement must be pinned (`openai==3.57.0`), so that a kept environment
    cannot be out of date. Processes that ask for the same environment at once build it once.
    Raises ClientEnvironmentError if a requirement is not pinned, pip fails, or the environment is not there within
    `deadline_s` seconds.
    """
    _refuse_unpinned(requirements, PINNED, "NAME==VERSION")
    options = [] if resolve else ["--no-deps"]
    parts = [sys.version, os.path.realpath(sys.executable)]  # not this clone's own link to it
    parts += sorted([*requirements, *options])

    def build(folder: Path, deadline: float) -> None:
        _build_python(folder, [*options, *requirements], deadline)

    return _kept(name, parts, build, deadline_s) / "bin" / "python"


def client_node(name: str, packages: Sequence[str], *, deadline_s: float = 300.0) -> Path:
    """The folder `node_modules` that holds exactly `packages` (`openai@6.49.0`) and what they need, for NODE_PATH.

    Raises ClientEnvironmentError as `client_python` does.
    """
    _refuse_unpinned(packages, PINNED_NPM, "NAME@VERSION")

    def build(folder: Path, deadline: float) -> None:
        folder.mkdir()
        npm = ["npm", "install", "--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts"]
        _run([*npm, *packages], deadline)

    return _kept(name, ["node", *sorted(packages)], build, deadline_s) / "node_modules"


async def printed_by(*arguments: object, deadline_s: float = CALL_S) -> str:
    """The standard output of a command that succeeds."""
    process = await asyncio.create_subprocess_exec(
        *map(str, arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(deadline_s):
            stdout, stderr = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode == 0, stderr.decode() + stdout.decode()
    return stdout.decode()


def _refuse_unpinned(requirements: Sequence[str], pinned: re.Pattern[str], form: str) -> None:
    for requirement in requirements:
        if not pinned.fullmatch(requirement):
            raise ClientEnvironmentError(f"requirement {requirement!r} is not pinned; write it as {form}")


def _kept(name: str, parts: Sequence[str], build: Callable[[Path, float], None], deadline_s: float) -> Path:
    """The folder of the environment that is made of `parts`, built where it must stay if it is not there yet.

    The file `.complete` comes last: what was cut short is built anew.
    """
    deadline = time.monotonic() + deadline_s
    folder = _cache_folder() / f"{name}-{_fingerprint(parts)}"
    with _locked(folder.with_suffix(".lock"), deadline):
        if not (folder / ".complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            build(folder, deadline)
            (folder / ".complete").touch()
    return folder


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "dynrt" / "environments"


def _fingerprint(parts: Sequence[str]) -> str:
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


def _build_python(folder: Path, install: Sequence[str], deadline: float) -> None:
    """By this interpreter's pip, and without compiling what may never be imported: four times as fast.

    `install`: requirements, and pip's options in front of them.
    """
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], deadline)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    _run([*pip, "install", "--no-input", "--no-compile", *install], deadline)


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
