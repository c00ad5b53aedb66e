"""Fronts are restarted, given up and killed as they should be; their processes are stand-ins, their sockets real."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.fronts import fronts as fronts_module
from dynrt.runtime.fronts.fronts import Fronts
from dynrt.runtime.fronts.link import Link
from dynrt.runtime.fronts.messages import (
    Beat,
    Drain,
    FrontSettings,
    Hello,
    Listening,
    State,
    ToFront,
)
from dynrt.runtime.http.options import EndpointOptions
from dynrt.runtime.http_counts import HttpCounts

DEADLINE_S = 20.0
SETTINGS = FrontSettings("", "", "127.0.0.1", 1, "/model", EndpointOptions())


class StandInRuntime:
    def models(self) -> list[Any]:
        return []

    def ready(self) -> str | None:
        return None

    def draining(self) -> bool:
        return False

    def count_http(self, counts: HttpCounts) -> None:
        assert counts.connections == 0


class StandIn:
    """A front process: `act` is called with it and each message that comes."""

    pid = 0

    def __init__(self, settings: FrontSettings, act: Callable[[StandIn, ToFront], None]) -> None:
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.link = Link(settings.address, settings.name, lambda message: act(self, message))
        self.link.send(Hello())

    async def exited(self) -> int:
        return await asyncio.shield(self.end)

    def exit(self, status: int) -> None:
        if not self.end.done():
            self.end.set_result(status)
            self.link.close()

    def kill(self) -> None:
        self.exit(-9)

    def release(self) -> None:
        raise AssertionError("a front never outlives the runtime")


class Spawned:
    """All that were started."""

    def __init__(self, act: Callable[[StandIn, ToFront], None]) -> None:
        self.processes: list[StandIn] = []
        self.names: list[str] = []
        self._act = act

    def __call__(self, settings: FrontSettings) -> StandIn:
        self.names.append(settings.name)
        self.processes.append(StandIn(settings, self._act))
        return self.processes[-1]

    async def number(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.processes) < count:  # noqa: ASYNC110 - restarts tell nobody
                await asyncio.sleep(1e-3)


def fronts_of(spawned: Spawned, count: int = 1) -> Fronts:
    return Fronts(StandInRuntime(), SETTINGS, count, spawned)  # type: ignore[arg-type]


def good(process: StandIn, message: ToFront) -> None:
    match message:
        case State():
            process.link.send(Listening())
            process.link.send(Beat())
        case Drain():
            process.exit(0)
        case _:
            pass


async def test_one_that_ends_is_started_again_under_another_name() -> None:
    spawned = Spawned(good)
    async with asyncio.timeout(DEADLINE_S), fronts_of(spawned, 2) as fronts:
        assert len(spawned.processes) == 2
        spawned.processes[0].exit(1)
        await spawned.number(3)
        assert len(set(spawned.names)) == 3
        await fronts.stop(1.0)
    assert spawned.processes[1].end.result() == 0, "it was drained"
    assert all(process.end.done() for process in spawned.processes)


async def test_one_that_cannot_start_is_a_fault_of_the_configuration() -> None:
    spawned = Spawned(lambda process, message: process.exit(2))
    with pytest.raises(ConfigError, match="status 2 before it listened"):
        async with asyncio.timeout(DEADLINE_S), fronts_of(spawned):
            pytest.fail("it never listened")


async def test_one_that_ends_again_and_again_ends_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts_module, "RestartPolicy", lambda: GivesUpAfter(2))

    def listens_and_ends(process: StandIn, message: ToFront) -> None:
        process.link.send(Listening())
        asyncio.get_running_loop().call_later(0.02, process.exit, 3)

    spawned = Spawned(listens_and_ends)
    with pytest.raises(ConfigError, match="again and again"):
        async with asyncio.timeout(DEADLINE_S), fronts_of(spawned):
            await asyncio.Event().wait()
    assert len(spawned.processes) == 3


class GivesUpAfter:
    def __init__(self, crashes: int) -> None:
        self._left = crashes

    def crashed(self, now: float) -> float | None:
        self._left -= 1
        return 0.0 if self._left >= 0 else None


async def test_one_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts_module, "SILENT_S", 0.1)
    monkeypatch.setattr(fronts_module, "BEAT_S", 0.02)

    def hangs_once(process: StandIn, message: ToFront) -> None:
        is_first = process is spawned.processes[0] if spawned.processes else True
        if not is_first:
            good(process, message)
        elif not listened:
            listened.append(True)
            process.link.send(Listening())

    listened: list[bool] = []
    spawned = Spawned(hangs_once)
    async with asyncio.timeout(DEADLINE_S), fronts_of(spawned) as fronts:
        await spawned.number(2)
        assert spawned.processes[0].end.result() == -9
        await fronts.stop(1.0)
