"""Where each request runs: the planner's decisions from what it was told of workers, caches and load (sans-IO)."""

from __future__ import annotations

from collections.abc import Generator
from random import Random

import msgspec

from dynrt.planner.admission import NO_LIMITS, AdmissionLimits, no_room, refusal, within_limits
from dynrt.planner.candidates import Candidate, Demand, best_local, best_remote, see_worker
from dynrt.planner.coefficients import FleetFit, StepTimes
from dynrt.planner.cost import UNCACHED_EXTRA
from dynrt.planner.events import CacheEvents, CacheSnapshot
from dynrt.planner.links import Links, Pair
from dynrt.planner.load import Load, LoadReport
from dynrt.planner.plan import Choice, NoPlan, Plan, PlanRequest, WorkerFacts
from dynrt.planner.prefix_index import DEFAULT_LIMIT_BYTES, TOKEN_BYTES, PrefixIndex
from dynrt.planner.ways import Ways, find_ways

EXPECTATION_S = 5.0  # a plan's blocks count as held for its expected time and so much longer


class _Worker(msgspec.Struct, frozen=True):
    facts: WorkerFacts
    load: Load


class _Open(msgspec.Struct, frozen=True):
    """A request that was planned and is not over."""

    prefill: str
    decode: str
    prefill_handle: int  # the prefix index's, of what this plan will leave there
    decode_handle: int  # the same if the plan is local


class Planner:
    """See the module. Methods that name a worker which has left, or a request which is over, do nothing."""

    def __init__(
        self,
        random: Random,
        uncached_extra: float = UNCACHED_EXTRA,
        index_bytes: int = DEFAULT_LIMIT_BYTES,
        limits: AdmissionLimits = NO_LIMITS,
    ) -> None:
        self._random = random
        self._uncached_extra = uncached_extra
        self._limits = limits
        self._workers: dict[str, _Worker] = {}
        self._index = PrefixIndex(random, index_bytes)
        self._fleet = FleetFit()
        self._links = Links()
        self._open: dict[bytes, _Open] = {}

    # --- workers and pairs ----------------------------------------------------------------------------

    def worker_joined(self, facts: WorkerFacts) -> None:
        """A worker is ready. Nothing known of an earlier incarnation under this id remains."""
        self.worker_left(facts.id)
        self._workers[facts.id] = _Worker(facts, Load(facts.block_size))
        self._index.add_worker(facts.id, facts.block_size)
        self._fleet.add_worker(facts.id, facts.kv_bytes_per_token)

    def worker_left(self, worker_id: str) -> None:
        """Plan nothing more there."""
        self._workers.pop(worker_id, None)
        self._index.drop_worker(worker_id)
        self._fleet.drop_worker(worker_id)
        self._links.drop_worker(worker_id)

    def pair_connected(self, prefill: str, decode: str) -> None:
        """The pair is eligible and its connection stands."""
        if prefill in self._workers and decode in self._workers and prefill != decode:
            self._links.add((prefill, decode))

    def pair_disconnected(self, prefill: str, decode: str) -> None:
        self._links.drop((prefill, decode))

    @property
    def pairs(self) -> set[Pair]:
        """The (prefill, decode) pairs that can hand over."""
        return self._links.pairs

    @property
    def incomplete_workers(self) -> list[str]:
        """Workers whose index counts as empty until their snapshot comes."""
        return self._index.incomplete_workers

    @property
    def index_bytes(self) -> int:
        """Estimated memory of the prefix index."""
        return self._index.num_bytes

    @property
    def dropped_blocks(self) -> int:
        """Blocks that the prefix index dropped at its memory bound, ever."""
        return self._index.dropped_blocks

    def load(self, worker_id: str) -> Load:
        """A worker's load, to be looked at. Raises KeyError for one that has left."""
        return self._workers[worker_id].load

    # --- news -----------------------------------------------------------------------------------------

    def cache_events(self, worker_id: str, events: CacheEvents) -> bool:
        """False, once per gap: ask this worker for a snapshot."""
        return self._index.apply(worker_id, events)

    def cache_snapshot(self, worker_id: str, snapshot: CacheSnapshot) -> Generator[None, None, bool]:
        """Returns False if events after the snapshot are missing: ask for another.

        Yields after every small part of the work. Until it is done, the worker may be told nothing else.
        """
        return self._index.restore(worker_id, snapshot)

    def step(self, worker_id: str, load: LoadReport, timing: StepTimes | None) -> None:
        """A worker's step is done; `timing` is None if it computed nothing."""
        worker = self._workers.get(worker_id)
        if worker is None:
            return
        if timing is not None:
            self._fleet.add(worker_id, timing)
        worker.load.step(load, timing)

    def pushed(self, prefill: str, decode: str, kv_bytes: int, duration_s: float) -> None:
        """A handoff moved so many bytes while the link was busy with it for this time."""
        self._links.pushed((prefill, decode), kv_bytes, duration_s)

    def exposed(self, exposed_s: float) -> None:
        """A handoff let its decode start so much later than no transfer would have."""
        self._links.exposed(exposed_s)

    # --- requests -------------------------------------------------------------------------------------

    def plan(self, request: PlanRequest, now: float) -> Plan | NoPlan:
        """Choose workers for a request and count it as theirs. A key that is open already is planned anew."""
        assert request.prompt_ids and len(request.prompt_ids) % TOKEN_BYTES == 0, len(request.prompt_ids)
        if request.key in self._open:
            self.failed(request.key)
        self._index.expire(now)
        demand = Demand(len(request.prompt_ids) // TOKEN_BYTES, request.max_tokens, self._uncached_extra)
        candidates = self._candidates(request, demand)
        ways = find_ways(request, demand, candidates, self._links)
        if not ways.prefills and not ways.locals:
            return self._no_way(request, demand, candidates)
        choices = self._choices(request, demand, ways)
        if not choices:
            return refusal([*ways.prefills, *ways.locals], self._limits)
        runner_up = choices[1] if len(choices) > 1 else None
        plan = _plan(choices[0], runner_up, demand.prompt_tokens, ways.reason)
        self._count(request, plan, now)
        return plan

    def first_token(self, key: bytes) -> None:
        """The prefill is done; the worker's own events tell by now what it holds."""
        request = self._open.get(key)
        if request is None:
            return
        self._index.withdraw(request.prefill, request.prefill_handle)
        if request.prefill in self._workers:
            self._workers[request.prefill].load.end_prefill(key)

    def finished(self, key: bytes) -> None:
        """The request ended as it should. What its decode worker should hold is believed until it expires."""
        request = self._open.pop(key, None)
        if request is None:
            return
        for worker_id in {request.prefill, request.decode}:
            worker = self._workers.get(worker_id)
            if worker is not None:
                worker.load.end(key)

    def failed(self, key: bytes) -> None:
        """The request failed, was cancelled, or is to be planned anew: nothing that was expected of it counts."""
        request = self._open.get(key)
        if request is None:
            return
        self._index.withdraw(request.prefill, request.prefill_handle)
        self._index.withdraw(request.decode, request.decode_handle)
        self.finished(key)

    def _candidates(self, request: PlanRequest, demand: Demand) -> list[Candidate]:
        hits = self._index.match(request.salt, request.prompt_ids)
        coefficients, random = self._fleet.coefficients, self._random.random
        candidates = []
        for name, worker in self._workers.items():
            if name in request.exclude and not request.prefilled_on:  # there, they only cannot decode
                continue
            hit_tokens, lot = hits.get(name, 0), random()
            seen = see_worker(worker.facts, worker.load, coefficients[name], demand, hit_tokens, lot)
            candidates.append(seen)
        return candidates

    def _no_way(self, request: PlanRequest, demand: Demand, candidates: list[Candidate]) -> NoPlan:
        """Why no worker could serve it, whatever the load."""
        num_workers = len(self._workers)
        if request.prefilled_on and request.prefilled_on not in self._workers:
            return NoPlan("no_worker", "the worker that holds the finished prompt is gone")
        if request.prefilled_on:
            return no_room([candidate for candidate in candidates if candidate.facts.can_decode])
        if not candidates:
            excluded = f", {num_workers} excluded because they failed this request" if num_workers else ""
            return NoPlan("no_worker", f"no worker is up{excluded}")
        if request.is_admitted:
            return NoPlan(
                "no_worker", f"of {num_workers} workers, those that had room for the request are gone"
            )
        return _too_long(demand, max(candidate.facts.room_tokens for candidate in candidates))

    def _choices(self, request: PlanRequest, demand: Demand, ways: Ways) -> list[Choice]:
        """Up to two, the best first. None: admission leaves no worker to prefill on.

        Workers are chosen by score, of remote as of local ones; between remote and local the honest time decides
        (docs/planner.md says why).
        """
        limits = NO_LIMITS if request.is_admitted else self._limits
        remote: list[Choice] = []
        local: list[Choice] = []
        if ways.prefills:
            prefills = within_limits(ways.prefills, limits)
            remote = best_remote(prefills, ways.decodes, self._links, demand.prompt_tokens)
        if ways.locals:
            local = best_local(within_limits(ways.locals, limits))
        if remote and local:
            return sorted((local[0], remote[0]), key=lambda choice: choice.expected_ms)
        return remote or local

    def _count(self, request: PlanRequest, plan: Plan, now: float) -> None:
        """What was planned is load, and soon cached, before the workers say so."""
        key, prefill, decode, tokens = request.key, plan.prefill, plan.decode, plan.prompt_tokens
        self._workers[prefill].load.plan_prefill(key, tokens, tokens - plan.prefill_hit_tokens)
        self._workers[decode].load.plan_decode(key, tokens, tokens - plan.decode_hit_tokens)
        expires_at = now + plan.expected_ms / 1e3 + EXPECTATION_S
        on_decode = on_prefill = self._index.expect(prefill, request.salt, request.prompt_ids, expires_at)
        if decode != prefill:
            on_decode = self._index.expect(decode, request.salt, request.prompt_ids, expires_at)
        self._open[key] = _Open(prefill, decode, on_prefill, on_decode)


def _plan(best: Choice, runner_up: Choice | None, prompt_tokens: int, reason: str) -> Plan:
    return Plan(
        best.kind,
        best.prefill,
        best.decode,
        best.prefill_hit_tokens,
        best.decode_hit_tokens,
        best.terms,
        best.expected_ms,
        best.score_ms,
        prompt_tokens,
        reason,
        runner_up,
    )


def _too_long(demand: Demand, room_tokens: int) -> NoPlan:
    return NoPlan(
        "too_long",
        f"the prompt has {demand.prompt_tokens} tokens and max_tokens is {demand.output_tokens}, together more than "
        f"any worker has room for; the largest takes {room_tokens}",
    )
