"""Engine processes: their end is seen, they take their children along, and none outlives who spawned it."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from zmq_engine import eventually

from dynrt.engines.config import EngineConfig
from dynrt.runtime import spawner
from dynrt.runtime.spawner import ProcessSpawner

HERE = Path(__file__).parent
GONE_S = 5.0  # a kill takes milliseconds; this is for a machine that does much else


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, str(HERE / "stand_in_engine.py")]
    monkeypatch.setattr(spawner, "dynrt_command", lambda: command)


def config(behaviour: str) -> EngineConfig:
    return EngineConfig(model_dir="/models/x", model_name=behaviour, role="decode")


def read_report(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def start(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command)


async def report_of(path: Path) -> dict[str, Any]:
    await eventually(path.exists, "the stand-in runs")
    return read_report(path)


@contextmanager
def watching(*pids: int) -> Iterator[list[int]]:
    pidfds = [os.pidfd_open(pid) for pid in pids]
    yield pidfds
    for pidfd in pidfds:
        os.close(pidfd)


def all_gone(pidfds: list[int]) -> bool:
    return all(select.select([pidfd], [], [], GONE_S)[0] for pidfd in pidfds)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_status_of_an_engine_that_ends_by_itself(tmp_path: Path) -> None:
    process = ProcessSpawner().spawn(config("exits"), str(tmp_path / "report"), "token")
    assert await asyncio.wait_for(process.exited(), 20.0) == 3
    process.kill()  # late, and no harm


async def test_engine_is_told_what_it_must_know(tmp_path: Path) -> None:
    process = ProcessSpawner().spawn(config("waits"), str(tmp_path / "report"), "the token")
    report = await report_of(tmp_path / "report")
    process.kill()
    await process.exited()
    assert report["spawn_token"] == "the token"
    assert report["settings"]["model_dir"] == "/models/x"
    assert report["settings"]["role"] == "decode"
    assert report["pid"] == process.pid


async def test_kill_ends_the_whole_group(tmp_path: Path) -> None:
    process = ProcessSpawner().spawn(config("waits"), str(tmp_path / "report"), "token")
    report = await report_of(tmp_path / "report")
    with watching(report["grandchild"]) as pidfds:
        process.kill()
        assert await asyncio.wait_for(process.exited(), GONE_S) == -9
        assert all_gone(pidfds)


async def test_children_of_an_engine_that_crashes_go_with_it(tmp_path: Path) -> None:
    process = ProcessSpawner().spawn(config("waits"), str(tmp_path / "report"), "token")
    report = await report_of(tmp_path / "report")
    with watching(report["grandchild"]) as pidfds:
        os.kill(process.pid, 11)
        assert await asyncio.wait_for(process.exited(), GONE_S) == -11
        assert all_gone(pidfds)


async def test_engines_share_no_descriptor_but_their_own_lifeline(tmp_path: Path) -> None:
    """One that held another's lifeline open would keep that one alive."""
    processes = [
        ProcessSpawner().spawn(config("waits"), str(tmp_path / f"report-{number}"), "token")
        for number in range(2)
    ]
    for number, process in enumerate(processes):
        report = await report_of(tmp_path / f"report-{number}")
        assert report["descriptors"] == [0, 1, 2, report["lifeline"]]
        process.kill()
        await process.exited()


async def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    await _spawn_and_end(tmp_path)  # the first one makes the loop's own
    before = num_descriptors()
    for _ in range(3):
        await _spawn_and_end(tmp_path)
    assert num_descriptors() == before


async def _spawn_and_end(tmp_path: Path) -> None:
    process = ProcessSpawner().spawn(config("exits"), str(tmp_path / "report"), "token")
    await process.exited()


async def test_command_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawner, "dynrt_command", lambda: ["/no/such/program"])
    before = num_descriptors()
    with pytest.raises(FileNotFoundError):
        ProcessSpawner().spawn(config("waits"), "", "token")
    assert num_descriptors() == before


async def test_engines_go_with_the_runtime_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves it no time to do anything: the lifelines close, and that is enough."""
    paths = [tmp_path / "report-0", tmp_path / "report-1"]
    parent = start(sys.executable, str(HERE / "spawning_parent.py"), *map(str, paths))
    try:
        reports = [await report_of(path) for path in paths]
        with watching(*(report[name] for report in reports for name in ("pid", "grandchild"))) as pidfds:
            parent.kill()
            assert all_gone(pidfds)
    finally:
        parent.kill()
        parent.wait()


async def test_adopted_process_is_seen_to_end_and_can_be_killed() -> None:
    for _ in range(2):
        stranger = start("sleep", "600")
        adopted = ProcessSpawner().adopt(stranger.pid)
        adopted.kill()
        await asyncio.wait_for(adopted.exited(), GONE_S)
        assert stranger.wait() == -9


async def test_released_process_lives_on_and_nothing_stays_open() -> None:
    stranger = start("sleep", "600")
    before = num_descriptors()
    adopted = ProcessSpawner().adopt(stranger.pid)
    adopted.release()
    adopted.kill()
    assert num_descriptors() == before
    assert stranger.poll() is None
    stranger.kill()
    stranger.wait()


async def test_process_that_has_ended_cannot_be_adopted() -> None:
    stranger = start("true")
    stranger.wait()
    with pytest.raises(ProcessLookupError):
        ProcessSpawner().adopt(stranger.pid)


def test_command_is_that_of_this_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    command = spawner.dynrt_command()
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("dynrt ")
