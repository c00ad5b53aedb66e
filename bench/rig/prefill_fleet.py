"""A fleet of prefill workers with bounded prefix caches, simulated from event to event (sans-IO).

A worker serves first come, first served, one request at a time: each step computes up to `step_tokens` of the prompt
tokens that its own cache lacks, at a constant rate. Full blocks enter its cache, least recently used out first, when
the prefill ends; that is also the first token. Decode takes its time elsewhere and slows nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import msgspec

from dynrt.planner.traces import TraceRequest


class FleetShape(msgspec.Struct, frozen=True):
    """How many workers there are, and what each of them can do."""

    num_workers: int
    blocks_per_worker: int
    prefill_tokens_per_s: float = 12_000.0
    token_interval_s: float = 0.02  # of decode
    step_tokens: int = 8192


class CacheChange(msgspec.Struct, frozen=True):
    """Blocks that entered a cache, below the block with key `parent_key` (0: none), and keys that left before."""

    parent_key: int
    stored_blocks: list[int]
    stored_keys: list[int]
    removed_keys: list[int]


class Step(msgspec.Struct, frozen=True):
    """What a worker tells of a step, as an engine would."""

    duration_s: float
    prefill_tokens: int
    prefill_context: int  # end² - start²
    active_blocks: int


class Served(msgspec.Struct, frozen=True):
    """How one request fared."""

    worker: int
    began_at: float
    prompt_tokens: int
    hit_tokens: int
    ttft_s: float


class BlockCache:
    """A worker's prefix cache of `num_blocks` blocks, least recently used out first, children before parents."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._keys: OrderedDict[int, int] = OrderedDict()  # by block id, the least recently used first
        self._new_keys = itertools.count(1)

    def __len__(self) -> int:
        return len(self._keys)

    def match(self, block_ids: Sequence[int]) -> int:
        """How many leading ones of these blocks it holds."""
        count = 0
        for block_id in block_ids:
            if block_id not in self._keys:
                break
            count += 1
        return count

    def store(self, block_ids: Sequence[int]) -> CacheChange:
        """Hold these blocks of one prompt, and use them."""
        assert len(block_ids) <= self._num_blocks, f"{len(block_ids)} blocks, room for {self._num_blocks}"
        held = self.match(block_ids)
        self.use(block_ids[:held])
        fresh = list(block_ids[held:])
        excess = len(self._keys) + len(fresh) - self._num_blocks
        removed = [self._keys.popitem(last=False)[1] for _ in range(excess)]
        keys = [next(self._new_keys) for _ in fresh]
        parent_key = self._keys[block_ids[held - 1]] if held else 0
        self._keys.update(zip(fresh, keys, strict=True))
        self.use(block_ids)
        return CacheChange(parent_key, fresh, keys, removed)

    def use(self, block_ids: Sequence[int]) -> None:
        """These were used just now, the deepest longest ago, so that parents never leave before children."""
        for block_id in reversed(block_ids):
            self._keys.move_to_end(block_id)


class Rule(Protocol):
    """Chooses workers. Rules that go by the workers' caches see them through their events, or as they are."""

    def choose(self, request: TraceRequest, now: float) -> int: ...
    def stepped(self, worker: int, step: Step, now: float) -> None: ...
    def prefilled(self, request: TraceRequest, worker: int, change: CacheChange) -> None: ...
    def finished(self, request: TraceRequest, worker: int) -> None: ...


class _Worker:
    """One prompt at a time, those behind it in a queue."""

    def __init__(self, shape: FleetShape) -> None:
        self.shape = shape
        self.cache = BlockCache(shape.blocks_per_worker)
        self.queue: deque[TraceRequest] = deque()
        self.current: TraceRequest | None = None
        self.began_at = 0.0
        self.hit_tokens = 0
        self.computed = 0  # tokens of the current prompt, hit included

    def begin(self, now: float) -> None:
        request = self.current = self.queue.popleft()
        usable = request.block_ids[: request.usable_blocks]
        held = self.cache.match(usable)
        self.cache.use(usable[:held])
        self.began_at = now
        self.hit_tokens = self.computed = held * request.block_tokens

    @property
    def is_done(self) -> bool:
        """The current prompt is computed."""
        return self.current is not None and self.computed == self.current.prompt_tokens

    def next_step_s(self) -> float:
        return self._next_tokens() / self.shape.prefill_tokens_per_s

    def finish_step(self) -> Step:
        request = self.current
        assert request is not None
        start, tokens = self.computed, self._next_tokens()
        self.computed = end = start + tokens
        return Step(
            duration_s=tokens / self.shape.prefill_tokens_per_s,
            prefill_tokens=tokens,
            prefill_context=end**2 - start**2,
            active_blocks=len(request.block_ids) if end < request.prompt_tokens else 0,
        )

    def _next_tokens(self) -> int:
        assert self.current is not None
        return min(self.shape.step_tokens, self.current.prompt_tokens - self.computed)


class PrefillFleet:
    """See the module. `run` may be called once."""

    def __init__(self, shape: FleetShape) -> None:
        self._shape = shape
        self._workers = [_Worker(shape) for _ in range(shape.num_workers)]
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()  # of events at the same moment
        self._served: dict[int, Served] = {}

    @property
    def caches(self) -> list[BlockCache]:
        return [worker.cache for worker in self._workers]

    def run(self, requests: Sequence[TraceRequest], rule: Rule) -> list[Served]:
        """Serve all requests; how each of them fared, in their order."""
        self._rule = rule
        for request in requests:
            self._at(request.arrival_s, partial(self._arrive, request))
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        return [self._served[request.number] for request in requests]

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happen))

    def _arrive(self, request: TraceRequest, now: float) -> None:
        number = self._rule.choose(request, now)
        worker = self._workers[number]
        worker.queue.append(request)
        if worker.current is None:
            self._begin(number, now)

    def _begin(self, number: int, now: float) -> None:
        worker = self._workers[number]
        if worker.queue:
            worker.begin(now)
            self._step(number, now)

    def _step(self, number: int, now: float) -> None:
        step_s = self._workers[number].next_step_s()
        self._at(now + step_s, partial(self._finish_step, number))

    def _finish_step(self, number: int, now: float) -> None:
        worker = self._workers[number]
        step = worker.finish_step()
        if worker.is_done:
            self._finish_prefill(number, now)
        self._rule.stepped(number, step, now)
        if worker.current is not None:
            self._step(number, now)
        else:
            self._begin(number, now)

    def _finish_prefill(self, number: int, now: float) -> None:
        worker = self._workers[number]
        request, worker.current = worker.current, None
        assert request is not None
        self._rule.prefilled(request, number, worker.cache.store(request.full_blocks))
        self._served[request.number] = Served(
            number, worker.began_at, request.prompt_tokens, worker.hit_tokens, now - request.arrival_s
        )
        decode_s = request.output_tokens * self._shape.token_interval_s
        self._at(now + decode_s, lambda now: self._rule.finished(request, number))
