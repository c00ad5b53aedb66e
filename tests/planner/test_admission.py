"""Who waits for too long is refused at once, and told when to come back."""

from __future__ import annotations

from random import Random
from typing import Literal

import pytest

from dynrt.planner.admission import NO_LIMITS, AdmissionLimits
from dynrt.planner.plan import NoPlan, Plan, PlanRequest, WorkerFacts
from dynrt.planner.planner import Planner
from dynrt.runtime.messages import EngineLoad, StepTiming, pack_ids

PROMPT_TOKENS = 1000


def fleet(limits: AdmissionLimits, roles: str = "pd") -> Planner:
    """A worker of each role, all pairs connected; 1 ms a prompt token."""
    planner = Planner(Random(0), limits=limits)
    for number, letter in enumerate(roles):
        role: Literal["prefill", "decode"] = "prefill" if letter == "p" else "decode"
        planner.worker_joined(WorkerFacts(f"{letter}{number}", role, 16, 32768, 1024, 8, num_blocks=4096))
        for tokens in range(100, 1100, 10):
            timing = StepTiming(tokens / 1e3, 0.0, tokens, tokens**2, 0, 0)
            planner.step(f"{letter}{number}", EngineLoad(), timing)
    for prefill in range(len(roles)):
        for decode in range(len(roles)):
            planner.pair_connected(f"p{prefill}", f"d{decode}")
    return planner


def request(
    number: int,
    local_prefill: Literal["auto", "never", "always"] = "auto",
    num_tokens: int = PROMPT_TOKENS,
    is_admitted: bool = False,
) -> PlanRequest:
    start = number * 100_000
    prompt_ids = pack_ids(range(start, start + num_tokens))
    key = number.to_bytes(16, "big")
    return PlanRequest(key, "", prompt_ids, 10, local_prefill, is_admitted=is_admitted)


def plan_until_refused(
    planner: Planner, local_prefill: Literal["auto", "never", "always"] = "auto"
) -> tuple[list[Plan], NoPlan]:
    plans: list[Plan] = []
    while True:
        plan = planner.plan(request(len(plans), local_prefill), 0.0)
        if isinstance(plan, NoPlan):
            return plans, plan
        plans.append(plan)


def test_refused_when_the_first_token_would_come_too_late_on_every_worker() -> None:
    plans, refusal = plan_until_refused(fleet(AdmissionLimits(max_ttft_s=3.5)))
    assert len(plans) == 6, "three on each of two workers, at 1 s each"
    assert all(plan.terms.queue_ms + plan.terms.compute_ms <= 3500 for plan in plans)
    assert refusal.kind == "too_slow"
    assert refusal.reason == "the first token is expected after 4.0 s at best, and 3.5 s is the limit"
    assert refusal.retry_after_s == pytest.approx(0.5, abs=0.1)


def test_when_that_time_is_over_it_is_let_in() -> None:
    planner = fleet(AdmissionLimits(max_ttft_s=3.5))
    plans, _ = plan_until_refused(planner)
    worker, computed = plans[-1].prefill, 600
    planner.step(worker, EngineLoad(), StepTiming(computed / 1e3, 0.0, computed, computed**2, 0, 0))
    plan = planner.plan(request(99), 0.6)
    assert isinstance(plan, Plan) and plan.prefill == worker


def test_a_worker_within_the_limit_is_taken_though_another_would_score_better() -> None:
    planner = fleet(AdmissionLimits(max_ttft_s=3.5), "ppd")
    plans, _ = plan_until_refused(planner, "never")
    assert sorted(plan.prefill for plan in plans) == ["p0"] * 3 + ["p1"] * 3


def test_short_requests_still_fit_where_long_ones_do_not() -> None:
    planner = fleet(AdmissionLimits(max_ttft_s=3.5))
    plan_until_refused(planner)
    assert isinstance(planner.plan(request(99, num_tokens=100), 0.0), Plan)


@pytest.mark.parametrize(("local_prefill", "admitted"), [("auto", 4), ("never", 2), ("always", 2)])
def test_refused_when_as_many_as_allowed_wait_on_every_worker(
    local_prefill: Literal["auto", "never", "always"], admitted: int
) -> None:
    planner = fleet(AdmissionLimits(max_waiting_requests=2))
    plans, refusal = plan_until_refused(planner, local_prefill)
    assert len(plans) == admitted
    assert refusal.kind == "queues_full"
    assert refusal.retry_after_s == pytest.approx(1.0, rel=0.1), "until one of them is computed"
    planner.first_token(request(0).key)
    assert isinstance(planner.plan(request(99, local_prefill), 0.0), Plan)


def test_what_was_refused_counts_nowhere() -> None:
    planner = fleet(AdmissionLimits(max_waiting_requests=1))
    plans, _ = plan_until_refused(planner)
    for number in range(len(plans)):
        planner.finished(request(number).key)
    assert [planner.load(worker).prefill_tokens for worker in ("p0", "d1")] == [0, 0]


def test_a_request_under_way_goes_on_whatever_the_load() -> None:
    planner = fleet(AdmissionLimits(max_ttft_s=3.5, max_waiting_requests=1))
    plan_until_refused(planner)
    assert isinstance(planner.plan(request(99, is_admitted=True), 0.0), Plan)


def test_without_limits_nobody_is_refused() -> None:
    planner = fleet(NO_LIMITS)
    assert all(isinstance(planner.plan(request(number), 0.0), Plan) for number in range(200))
