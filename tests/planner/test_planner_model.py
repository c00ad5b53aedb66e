"""Whatever happens in whatever order, plans name workers that can serve them, and loads end at zero."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynrt.planner.candidates import Candidate, best_remote, transfer_ms
from dynrt.planner.links import Links
from dynrt.planner.plan import NoPlan, PlanRequest, WorkerFacts
from dynrt.planner.planner import Planner
from dynrt.runtime.messages import EngineLoad, StepTiming, pack_ids

WORKERS = ("u", "v", "w", "x")
KEYS = [bytes([number]) * 16 for number in range(5)]

workers = st.sampled_from(WORKERS)
keys = st.sampled_from(KEYS)


def facts(worker_id: str, role: str, num_blocks: int = 64) -> WorkerFacts:
    return WorkerFacts(worker_id, role, 4, 4096, 1024, 4, num_blocks)  # type: ignore[arg-type]


class PlannerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.planner = Planner(Random(0))
        self.roles: dict[str, str] = {}
        self.room: dict[str, int] = {}
        self.connected: set[tuple[str, str]] = set()
        self.open: dict[bytes, tuple[str, str]] = {}
        self.now = 0.0

    @rule(
        worker=workers,
        role=st.sampled_from(("prefill", "decode", "both")),
        num_blocks=st.sampled_from((32, 64, 128)),
    )
    def joins_or_restarts(self, worker: str, role: str, num_blocks: int) -> None:
        self.planner.worker_joined(facts(worker, role, num_blocks))
        self._forget(worker)
        self.roles[worker] = role
        self.room[worker] = 4 * num_blocks + 1

    @rule(worker=workers)
    def leaves(self, worker: str) -> None:
        self.planner.worker_left(worker)
        self._forget(worker)

    @rule(prefill=workers, decode=workers)
    def connects(self, prefill: str, decode: str) -> None:
        self.planner.pair_connected(prefill, decode)
        if prefill != decode and {prefill, decode} <= self.roles.keys():
            self.connected.add((prefill, decode))

    @rule(prefill=workers, decode=workers)
    def disconnects(self, prefill: str, decode: str) -> None:
        self.planner.pair_disconnected(prefill, decode)
        self.connected.discard((prefill, decode))

    @rule(
        key=keys,
        prompt=st.lists(st.integers(1, 2), min_size=1, max_size=300),
        local_prefill=st.sampled_from(("auto", "never", "always")),
        exclude=st.frozensets(workers, max_size=2),
        duration=st.floats(0, 3),
    )
    def plans(
        self, key: bytes, prompt: list[int], local_prefill: str, exclude: frozenset[str], duration: float
    ) -> None:
        self.now += duration
        request = PlanRequest(key, "", pack_ids(prompt), 50, local_prefill, exclude)  # type: ignore[arg-type]
        plan = self.planner.plan(request, self.now)
        self.open.pop(key, None)
        usable = self.roles.keys() - exclude
        roomy = {worker for worker in usable if len(prompt) + 50 <= self.room[worker]}
        if isinstance(plan, NoPlan):
            assert not roomy
            return
        self.open[key] = (plan.prefill, plan.decode)
        assert {plan.prefill, plan.decode} <= usable
        assert (plan.kind == "local") == (plan.prefill == plan.decode)
        decoders = {worker for worker in roomy if self.roles[worker] != "prefill"}
        prefillers = {
            worker
            for worker in usable
            if self.roles[worker] != "decode" and len(prompt) + 1 <= self.room[worker]
        }
        pairs = {(p, d) for p, d in self.connected if p in prefillers and d in decoders}
        if plan.kind == "remote":
            assert (plan.prefill, plan.decode) in pairs and local_prefill != "always"
        else:
            assert plan.decode in (decoders or roomy)
            assert local_prefill != "never" or not pairs
        if plan.runner_up is not None and plan.runner_up.kind == plan.kind:
            assert plan.score_ms <= plan.runner_up.score_ms
        elif plan.runner_up is not None:
            assert plan.expected_ms <= plan.runner_up.expected_ms
        assert 0 <= plan.prefill_hit_tokens < len(prompt)
        assert 0 <= plan.decode_hit_tokens <= len(prompt)
        assert plan.expected_ms >= 0

    @rule(key=keys)
    def first_token(self, key: bytes) -> None:
        self.planner.first_token(key)

    @rule(key=keys, failed=st.booleans())
    def ends(self, key: bytes, failed: bool) -> None:
        (self.planner.failed if failed else self.planner.finished)(key)
        self.open.pop(key, None)

    @precondition(lambda self: self.roles)
    @rule(worker=workers, tokens=st.integers(0, 64), requests=st.integers(0, 4), active=st.integers(0, 64))
    def steps(self, worker: str, tokens: int, requests: int, active: int) -> None:
        timing = StepTiming(0.001 * (1 + tokens + requests), 0.0, tokens, tokens**2, requests, 10 * requests)
        self.planner.step(worker, EngineLoad(blocks_active=active), timing)

    @invariant()
    def knows_exactly_the_pairs_that_stand(self) -> None:
        assert self.planner.pairs == self.connected

    @invariant()
    def load_is_that_of_the_open_requests(self) -> None:
        for worker in self.roles:
            load = self.planner.load(worker)
            assert (
                min(load.prefill_tokens, load.prefill_context, load.decode_kv_tokens, load.held_tokens) >= 0
            )
            assert load.decode_requests == sum(decode == worker for _, decode in self.open.values())
            if not any(worker in pair for pair in self.open.values()):
                assert load.prefill_tokens == load.decode_kv_tokens == load.held_tokens == 0

    def _forget(self, worker: str) -> None:
        self.roles.pop(worker, None)
        self.connected = {pair for pair in self.connected if worker not in pair}
        gone = ""
        self.open = {
            key: (gone if prefill == worker else prefill, gone if decode == worker else decode)
            for key, (prefill, decode) in self.open.items()
        }


TestPlannerModel = PlannerMachine.TestCase
TestPlannerModel.settings = settings(max_examples=80, stateful_step_count=40)


costs = st.sampled_from((0.0, 1.0, 1.5, 40.0, 300.0))
hits = st.sampled_from((0, 64, 128))


@st.composite
def candidates(draw: st.DrawFn, prefix: str) -> list[Candidate]:
    count = draw(st.integers(0, 5))
    return [
        candidate(
            f"{prefix}{number}",
            draw(hits),
            draw(hits),
            draw(costs),
            draw(costs) + 1.0,
            draw(costs),
            draw(costs),
        )
        for number in range(count)
    ]


def candidate(
    name: str,
    hit: int,
    prefill_hit: int,
    queue_ms: float,
    compute_ms: float,
    extra_ms: float,
    batch_ms: float,
) -> Candidate:
    return Candidate(
        facts(name, "both"),
        hit_tokens=hit,
        prefill_hit_tokens=prefill_hit,
        queue_ms=queue_ms,
        compute_ms=compute_ms,
        extra_ms=extra_ms,
        batch_ms=batch_ms,
        interruption_ms=0.0,
        waiting_requests=0,
        lot=0.0,
        prefill_score_ms=queue_ms + compute_ms + extra_ms,
        local_score_ms=queue_ms + compute_ms + extra_ms + batch_ms,
        decode_ms=batch_ms + queue_ms,
    )


@given(candidates("p"), candidates("d"), st.randoms(use_true_random=False))
def test_the_pruned_search_finds_what_trying_all_pairs_finds(
    prefills: list[Candidate], decodes: list[Candidate], random: Random
) -> None:
    links = Links()
    scores = []
    for prefill, decode in product(prefills, decodes):
        pair = (prefill.facts.id, decode.facts.id)
        if random.random() < 0.8:
            links.add(pair)
            links.pushed(pair, random.choice((10**4, 10**7)), 0.001)
    for prefill, decode in product(prefills, decodes):
        pair = (prefill.facts.id, decode.facts.id)
        if pair in links:
            exposed_ms = transfer_ms(prefill, decode.hit_tokens, 200, links.rate(pair))
            scores.append(prefill.prefill_score_ms + exposed_ms + links.handoff_ms + decode.decode_ms)
    found = [choice.score_ms for choice in best_remote(prefills, decodes, links, 200)]
    assert found == pytest.approx(sorted(scores)[:2])
