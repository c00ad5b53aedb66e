"""dynrt's own planner as a rule: told of caches and steps as the runtime would tell it.

All prefill workers hand over to one decode worker that is never short of anything, and KV is so small that no
transfer shows: what is left to choose is the prefill worker.
"""

from __future__ import annotations

from random import Random
from typing import Literal

from dynrt.planner.cost import UNCACHED_EXTRA
from dynrt.planner.events import BlocksRemoved, BlocksStored, CacheEvent, CacheEvents
from dynrt.planner.plan import Plan, PlanRequest, WorkerFacts
from dynrt.planner.planner import Planner
from dynrt.planner.traces import BLOCK_TOKENS, TraceRequest, block_token_ids
from dynrt.runtime.messages import EngineLoad, StepTiming
from rig.prefill_fleet import CacheChange, FleetShape, Step

DECODE = "decode"
LONGEST_CONTEXT = 2**20  # tokens
ENDLESS_BLOCKS = 2**40


class PlannerRule:
    """See the module."""

    def __init__(
        self,
        shape: FleetShape,
        random: Random,
        block_tokens: int = BLOCK_TOKENS,
        uncached_extra: float = UNCACHED_EXTRA,
    ) -> None:
        self.planner = Planner(random, uncached_extra)
        self._block_tokens = block_tokens
        self.names = [f"prefill-{number}" for number in range(shape.num_workers)]
        self._next_seq = [0] * shape.num_workers
        self.planner.worker_joined(_facts(DECODE, "decode", block_tokens, ENDLESS_BLOCKS))
        for name in self.names:
            self.planner.worker_joined(_facts(name, "prefill", block_tokens, shape.blocks_per_worker))
            self.planner.pair_connected(name, DECODE)

    def choose(self, request: TraceRequest, now: float) -> int:
        return self.names.index(self.plan(request, now).prefill)

    def plan(self, request: TraceRequest, now: float) -> Plan:
        """What the planner decides, and counts as decided."""
        max_tokens = max(1, request.output_tokens)
        asked = PlanRequest(_key(request), "", request.prompt_ids(), max_tokens, local_prefill="never")
        plan = self.planner.plan(asked, now)
        assert isinstance(plan, Plan), plan
        return plan

    def stepped(self, worker: int, step: Step, now: float) -> None:
        load = EngineLoad(blocks_active=step.active_blocks)
        timing = StepTiming(step.duration_s, now, step.prefill_tokens, step.prefill_context, 0, 0)
        self.planner.step(self.names[worker], load, timing)

    def prefilled(self, request: TraceRequest, worker: int, change: CacheChange) -> None:
        self.planner.first_token(_key(request))
        events = _cache_events(change, self._block_tokens)
        if events:
            run = CacheEvents(self._next_seq[worker], events)
            assert self.planner.cache_events(self.names[worker], run), f"refused: {change}"
            self._next_seq[worker] += len(events)

    def finished(self, request: TraceRequest, worker: int) -> None:
        self.planner.finished(_key(request))


def _facts(name: str, role: Literal["prefill", "decode"], block_tokens: int, num_blocks: int) -> WorkerFacts:
    return WorkerFacts(
        name,
        role,
        block_tokens,
        context_length=LONGEST_CONTEXT,
        kv_bytes_per_token=1,
        num_layers=32,
        num_blocks=num_blocks,
    )


def _key(request: TraceRequest) -> bytes:
    return request.number.to_bytes(16, "little")


def _cache_events(change: CacheChange, block_tokens: int) -> list[CacheEvent]:
    events: list[CacheEvent] = []
    if change.removed_keys:
        events.append(BlocksRemoved(change.removed_keys))
    if change.stored_keys:
        token_ids = block_token_ids(change.stored_blocks, block_tokens)
        events.append(BlocksStored(change.parent_key, change.stored_keys, token_ids))
    return events
