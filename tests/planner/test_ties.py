"""Workers that differ by less than their fits can tell are chosen by lot; a real difference decides."""

from __future__ import annotations

from random import Random

import pytest

from dynrt.planner.plan import Plan, PlanRequest, WorkerFacts
from dynrt.planner.planner import Planner
from dynrt.runtime.messages import EngineLoad, StepTiming, pack_ids


def planner_of_two(slower_by: float) -> Planner:
    planner = Planner(Random(1))
    for worker, slowness in (("even", 1.0), ("slower", 1.0 + slower_by)):
        planner.worker_joined(WorkerFacts(worker, "both", 16, 4096, 1024, num_layers=4, num_blocks=512))
        for tokens in range(100, 1100, 10):
            duration_s = tokens * 1e-4 * slowness
            planner.step(worker, EngineLoad(), StepTiming(duration_s, 0.0, tokens, tokens**2, 0, 0))
    return planner


def chosen_when_idle(planner: Planner) -> set[str]:
    chosen = set()
    for number in range(40):
        key = bytes([number])
        plan = planner.plan(PlanRequest(key, "", pack_ids([number] * 800), 1, "always"), now=0.0)
        assert isinstance(plan, Plan)
        chosen.add(plan.prefill)
        planner.failed(key)
    return chosen


@pytest.mark.parametrize(
    ("slower_by", "expected"), [(0.001, {"even", "slower"}), (0.1, {"even"})], ids=["0.1 %", "10 %"]
)
def test_requests_that_find_the_fleet_idle_use_all_of_it(slower_by: float, expected: set[str]) -> None:
    assert chosen_when_idle(planner_of_two(slower_by)) == expected
