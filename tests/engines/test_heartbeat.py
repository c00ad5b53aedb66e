"""The heartbeat thread: beats under its engine's name, tells a step's age, and outlives runtimes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from thread_fakes import DEADLINE_S, FakeRuntime, Heard

from dynrt.engines.heartbeat import HeartbeatThread, StepClock
from dynrt.runtime.errors import ConfigError
from dynrt.runtime.messages import HEARTBEAT_SUFFIX, Heartbeat

ME = "e" * 16


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[FakeRuntime]:
    runtime = FakeRuntime(tmp_path)
    yield runtime
    runtime.close()


def test_beats_carry_the_age_of_the_step_and_of_the_transfer_thread_s_turn(runtime: FakeRuntime) -> None:
    clock = StepClock()
    thread = HeartbeatThread(runtime.address, ME, clock, lambda: 7.5, Heard())
    thread.start(0.005)
    identity, beat = runtime.next(Heartbeat)
    assert (identity, beat) == (ME + HEARTBEAT_SUFFIX, Heartbeat(ME, 0.0, 7.5))
    clock.begin()
    ages = [runtime.next(Heartbeat)[1].step_age_s for _ in range(3)]
    assert ages == sorted(ages) and ages[-1] > 0
    clock.end()
    while runtime.next(Heartbeat)[1].step_age_s:
        pass
    thread.stop(DEADLINE_S)


def test_it_goes_on_with_the_next_runtime(runtime: FakeRuntime) -> None:
    failures = Heard()
    thread = HeartbeatThread(runtime.address, ME, StepClock(), float, failures)
    thread.start(0.005)
    runtime.next(Heartbeat)
    runtime.shut()
    runtime.open()
    thread.start(0.001)  # its Welcome
    runtime.next(Heartbeat)
    thread.stop(DEADLINE_S)
    assert not failures.log


def test_it_can_be_stopped_before_its_start(runtime: FakeRuntime) -> None:
    HeartbeatThread(runtime.address, ME, StepClock(), float, Heard()).stop(DEADLINE_S)


def test_a_failure_is_told() -> None:
    failures = Heard()
    thread = HeartbeatThread("nowhere", ME, StepClock(), float, failures)
    thread.start(0.005)
    assert "'nowhere' is no address" in str(failures.next(ConfigError))
