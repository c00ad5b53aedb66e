"""Who chooses the workers of a replay: dynrt's planner, or another router's rule in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from dynrt.planner.candidates import Candidate, Demand, best_remote
from dynrt.planner.plan import Choice, NoPlan, Plan, PlanRequest
from dynrt.planner.planner import Planner
from dynrt.planner.routing_rules import RULES, Router
from dynrt.planner.traces import TOKEN_BYTES, TraceRequest
from dynrt.planner.ways import Ways

OURS = "planner"


class _SeenCache:
    """What the prefix index says of one worker's cache about the request that is placed right now."""

    def __init__(self) -> None:
        self.hit_blocks = 0

    def match(self, block_ids: Sequence[int]) -> int:
        return min(self.hit_blocks, len(block_ids))


class RulePlanner(Planner):
    """Prefill where a rule says, decode where the fewest requests are; without prefill workers, both where it says.

    Sees caches as the planner does, through the workers' events. The fleet may not change.
    """

    def __init__(self, rule: str, random: Random) -> None:
        super().__init__(random)
        self._make_rule = RULES[rule]
        self._rule: Router | None = None
        self._caches: list[_SeenCache] = []
        self._placed: dict[bytes, tuple[TraceRequest, int]] = {}  # requests that are open, and where they are
        self._prefilling: set[bytes] = set()
        self._num_placed = 0
        self._now = 0.0

    def plan(self, request: PlanRequest, now: float) -> Plan | NoPlan:
        self._now = now
        return super().plan(request, now)

    def first_token(self, key: bytes) -> None:
        super().first_token(key)
        self._prefilled(key)

    def finished(self, key: bytes) -> None:
        super().finished(key)
        self._prefilled(key)  # if that never came
        request, worker = self._placed.pop(key, (None, 0))
        if request is not None and self._rule is not None:
            self._rule.finished(request, worker)

    def _prefilled(self, key: bytes) -> None:
        if key in self._prefilling and self._rule is not None:
            self._prefilling.discard(key)
            self._rule.prefilled(*self._placed[key])

    def _choices(self, request: PlanRequest, demand: Demand, ways: Ways) -> list[Choice]:
        if request.prefilled_on:  # and moves on, of which no rule says anything
            return super()._choices(request, demand, ways)
        prefills = sorted(ways.prefills or ways.decodes, key=lambda candidate: candidate.facts.id)
        prefill = prefills[self._place(request, prefills, demand.prompt_tokens)]
        if prefill.facts.can_decode:
            return [prefill.local_choice()]
        decode = min(ways.decodes, key=lambda candidate: self.load(candidate.facts.id).decode_requests)
        return best_remote([prefill], [decode], self._links, demand.prompt_tokens)

    def _place(self, request: PlanRequest, prefills: list[Candidate], prompt_tokens: int) -> int:
        """The index of the worker that the rule chooses."""
        if self._rule is None:
            self._caches = [_SeenCache() for _ in prefills]
            self._rule = self._make_rule(self._caches, self._random)
        block_size = prefills[0].facts.block_size
        for cache, prefill in zip(self._caches, prefills, strict=True):
            cache.hit_blocks = prefill.hit_tokens // block_size
        block_ids = _block_ids(request.prompt_ids, block_size * TOKEN_BYTES)
        placed = TraceRequest(
            self._num_placed, self._now, prompt_tokens, request.max_tokens, block_ids, block_size
        )
        worker = self._rule.choose(placed, self._now)
        self._num_placed += 1
        self._placed[request.key] = placed, worker
        self._prefilling.add(request.key)
        return worker


POLICIES: dict[str, Callable[[Random], Planner]] = {
    OURS: Planner,
    **{name: partial(RulePlanner, name) for name in RULES},
}


def _block_ids(prompt_ids: bytes, block_bytes: int) -> list[int]:
    """A number for each block, the same for the same tokens behind the same tokens."""
    block_ids: list[int] = []
    parent = 0
    for start in range(0, len(prompt_ids), block_bytes):
        parent = hash((parent, prompt_ids[start : start + block_bytes]))
        block_ids.append(parent)
    return block_ids
