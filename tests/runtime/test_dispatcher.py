"""The dispatcher: what a step's report changes, who is heard, and what becomes of a failure while dealing with one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from registrations import NotingChannel, registration

from dynrt.planner.events import CacheEvents
from dynrt.runtime.dispatcher import Dispatcher
from dynrt.runtime.fleet import Fleet
from dynrt.runtime.messages import EngineLoad, StepReport, StepTiming, Unknown
from dynrt.runtime.metrics import Metrics
from dynrt.runtime.planning import CacheSeen
from dynrt.runtime.worker import Worker

LOAD = EngineLoad(running_requests=3, blocks_active=7, preemptions_total=2)
TIMING = StepTiming(0.1, 1.0, prefill_tokens=5, prefill_context=25, decode_requests=3, decode_kv_tokens=99)
CACHE = CacheEvents(1, [])


class Setting:
    """A dispatcher whose neighbours note what they are told; each step brings clients four tokens."""

    def __init__(self) -> None:
        self.channel, self.metrics = NotingChannel(), Metrics("tiny")
        self.fleet = Fleet("rt", "tiny", 0.5, self.channel)
        self.steps: list[tuple[Any, ...]] = []
        self.told: list[Any] = []
        planner: Any = SimpleNamespace(step=lambda *step: self.steps.append(step), tell=self.told.append)
        self.attempts: Any = SimpleNamespace(step=lambda worker, report: 4)
        unused: Any = None
        self.dispatcher = Dispatcher(
            unused, self.fleet, planner, unused, self.attempts, self.metrics, asyncio.TaskGroup()
        )
        observer: Any = SimpleNamespace(worker_up=lambda worker: None, tell=self.channel.send)
        self.fleet.observer = observer
        self.fleet.register("w", registration("inc"), None, now=-1.0)
        self.channel.take()
        worker = self.fleet.get("inc")
        assert worker is not None
        self.worker: Worker = worker


async def test_a_step_tells_of_the_worker_and_is_counted() -> None:
    setting = Setting()
    setting.dispatcher.on_message("inc", StepReport([], LOAD, TIMING, CACHE))
    assert setting.worker.load == LOAD and setting.worker.heard_at > 0
    assert setting.steps == [("inc", LOAD, TIMING)] and setting.told == [CacheSeen("inc", CACHE)]
    setting.dispatcher.on_message("inc", StepReport([], LOAD, None))
    assert len(setting.steps) == 2 and len(setting.told) == 1
    text = setting.metrics.text().decode()
    assert 'vllm:num_preemptions_total{engine="0",model_name="tiny"} 2.0' in text, "once for both reports"
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 8.0' in text
    assert "dynrt_step_tokens_sum 8.0" in text and "dynrt_step_tokens_count 1.0" in text


async def test_who_is_not_known_is_told_so() -> None:
    setting = Setting()
    setting.dispatcher.on_message("stranger", StepReport([], LOAD, TIMING))
    assert setting.channel.take() == [("stranger", Unknown())] and setting.steps == []


async def test_a_failure_is_the_runtimes_to_raise_not_the_event_loops() -> None:
    setting = Setting()
    setting.attempts.step = lambda worker, report: 1 / 0
    setting.dispatcher.on_message("inc", StepReport([], LOAD, TIMING))
    with pytest.raises(ZeroDivisionError):
        await setting.dispatcher.surface_failures()
