"""Other routers' rules in the planner's place."""

from __future__ import annotations

from random import Random

from dynrt.planner.events import ROOT, BlocksStored, CacheEvents
from dynrt.planner.plan import Plan, PlanRequest, WorkerFacts
from dynrt.planner.planner import Planner
from dynrt.runtime.messages import Role, pack_ids
from dynrt.runtime.replay.policies import POLICIES

BLOCK = 4


def planner_for(policy: str, *roles: Role) -> Planner:
    """With workers named after their place, all pairs connected."""
    planner = POLICIES[policy](Random(1))
    names = {f"{number}": role for number, role in enumerate(roles)}
    for name, role in names.items():
        planner.worker_joined(WorkerFacts(name, role, BLOCK, 1000, 1024, num_layers=2, num_blocks=100))
    for prefill in names:
        for decode in names:
            if names[prefill] == "prefill" and names[decode] == "decode":
                planner.pair_connected(prefill, decode)
    return planner


def plan(planner: Planner, number: int, prompt: list[int]) -> Plan:
    request = PlanRequest(number.to_bytes(16, "little"), "", pack_ids(prompt), max_tokens=5)
    made = planner.plan(request, now=0.0)
    assert isinstance(made, Plan)
    return made


def test_prefill_goes_by_the_rule_and_decode_to_the_fewest_requests() -> None:
    planner = planner_for("round-robin", "prefill", "prefill", "decode", "decode")
    plans = [plan(planner, number, [number] * 8) for number in range(4)]
    assert [made.prefill for made in plans] == ["0", "1", "0", "1"]
    assert {made.kind for made in plans} == {"remote"}
    assert sorted(made.decode for made in plans) == ["2", "2", "3", "3"]


def test_without_prefill_workers_both_go_by_the_rule() -> None:
    planner = planner_for("round-robin", "decode", "decode")
    plans = [plan(planner, number, [number] * 8) for number in range(2)]
    assert [(made.kind, made.prefill, made.decode) for made in plans] == [
        ("local", "0", "0"),
        ("local", "1", "1"),
    ]


def test_rules_see_what_workers_say_of_their_caches() -> None:
    planner = planner_for("ttft-a8", "prefill", "prefill", "decode")
    prompt = [*range(20)]
    stored = BlocksStored(ROOT, [1, 2, 3, 4], pack_ids(prompt[:16]))
    planner.cache_events("1", CacheEvents(0, [stored]))
    made = plan(planner, 1, prompt)
    assert (made.prefill, made.prefill_hit_tokens) == ("1", 16)


def test_a_request_counts_until_it_is_over_or_planned_anew() -> None:
    planner = planner_for("least-loaded", "prefill", "prefill", "decode")
    first = plan(planner, 1, [1] * 8).prefill
    second = plan(planner, 2, [2] * 8).prefill
    assert first != second
    planner.first_token((1).to_bytes(16, "little"))
    planner.finished((1).to_bytes(16, "little"))
    assert plan(planner, 3, [3] * 8).prefill == first
    planner.failed((2).to_bytes(16, "little"))
    assert plan(planner, 4, [4] * 8).prefill == second
    assert {plan(planner, 4, [4] * 8).prefill for _ in range(20)} == {second}, "not counted twice"
