"""Other routers' rules as rules of the simulated fleet, whose caches they see exact and at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from dynrt.planner.routing_rules import RULES, Cache, Router
from dynrt.planner.traces import TraceRequest
from rig.prefill_fleet import BlockCache, CacheChange, Rule, Step


class OtherRule:
    """A Rule: tells a router what it wants to know."""

    def __init__(
        self,
        make_router: Callable[[Sequence[Cache], Random], Router],
        caches: Sequence[BlockCache],
        random: Random,
    ) -> None:
        self._router = make_router(caches, random)

    def choose(self, request: TraceRequest, now: float) -> int:
        return self._router.choose(request, now)

    def stepped(self, worker: int, step: Step, now: float) -> None:
        pass  # none of them goes by the time that steps take

    def prefilled(self, request: TraceRequest, worker: int, change: CacheChange) -> None:
        self._router.prefilled(request, worker)

    def finished(self, request: TraceRequest, worker: int) -> None:
        self._router.finished(request, worker)


OTHER_RULES: dict[str, Callable[[Sequence[BlockCache], Random], Rule]] = {
    name: partial(OtherRule, make_router) for name, make_router in RULES.items()
}
