"""Which worker holds how much of a prompt's KV (sans-IO).

Fed by the workers' numbered cache events, checked by snapshots, and, until events arrive, by the plans just made.

Its memory is bounded. At the bound, what one worker holds on one edge is dropped, the least recently matched or
stored of a few drawn by lot (as Redis evicts keys), until the rest fits. What was dropped counts as not held, and
so does all that the worker stores below it, until the worker stores it anew or sends a snapshot.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator
from random import Random

import msgspec

from dynrt.planner.block_runs import BlockRuns, Run, ascending_runs, key_ranges
from dynrt.planner.early_events import EarlyEvents
from dynrt.planner.edge import Bits, Edge
from dynrt.planner.events import (
    ROOT,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    CacheEvents,
    CacheSnapshot,
)
from dynrt.planner.holders import Holders
from dynrt.planner.index_memory import PLAN_BYTES, RUN_BYTES, TREE_BYTES, IndexMemory
from dynrt.planner.radix_tree import RadixTree

TOKEN_BYTES = 4
DEFAULT_LIMIT_BYTES = 256_000_000
DRAWN_RUNS = 16  # of which the least recently used is dropped


class _Expected(msgspec.Struct, frozen=True):
    """A plan's whole blocks, from the beginning of its prompt."""

    tree: RadixTree
    edge: Edge  # the last block is on this edge or above it
    count: int


class _Worker:
    """One worker's part of the index."""

    def __init__(self, name: str, block_size: int, bit: Bits, expected_bit: Bits) -> None:
        self.name = name
        self.block_size = block_size
        self.bit = bit
        self.expected_bit = expected_bit
        self.next_seq = 0
        self.early: EarlyEvents | None = None  # not None: events are missing, a snapshot is awaited
        self.is_cut = False  # something was dropped at the memory bound: parents may be unknown
        self.runs = BlockRuns()
        self.expected: dict[int, _Expected] = {}  # by handle


class PrefixIndex:
    """See the module. Workers may have different block sizes; only whole blocks are indexed."""

    def __init__(self, random: Random, limit_bytes: int = DEFAULT_LIMIT_BYTES) -> None:
        self.dropped_blocks = 0  # at the memory bound, ever
        self._random = random
        self._limit_bytes = limit_bytes
        self._memory = IndexMemory()
        self._workers: dict[str, _Worker] = {}
        self._trees: dict[tuple[str, int], RadixTree] = {}  # by salt and block size
        self._block_sizes: tuple[int, ...] = ()
        self._holders = Holders()
        self._expiries: list[tuple[float, int, str]] = []  # heap of (time, handle, worker)
        self._last_handle = 0

    @property
    def incomplete_workers(self) -> list[str]:
        """Workers whose events had a gap and whose snapshot has not come: their index counts as empty."""
        return [name for name, worker in self._workers.items() if worker.early is not None]

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held or expected by anybody, and no memory kept for it."""
        return not self._trees

    @property
    def num_bytes(self) -> int:
        """Estimated memory; beside it, at most 1 MiB per worker whose snapshot is awaited."""
        return self._memory.num_bytes

    def add_worker(self, name: str, block_size: int) -> None:
        """A new incarnation: nothing known of an earlier worker of that name remains. Events start at number 0."""
        assert block_size > 0, block_size
        self.drop_worker(name)
        self._workers[name] = _Worker(name, block_size, self._holders.add(name), self._holders.add(name))
        self._note_block_sizes()

    def drop_worker(self, name: str) -> None:
        """Forget a worker. Unknown: no-op."""
        worker = self._workers.get(name)
        if worker is None:
            return
        self._forget_blocks(worker)
        del self._workers[name]
        self._holders.drop(name)
        self._note_block_sizes()

    def match(self, salt: str, prompt_ids: bytes) -> dict[str, int]:
        """Leading tokens of the prompt that each worker holds, or is about to; workers with none are left out."""
        hits: dict[str, int] = {}
        for block_size in self._block_sizes:
            tree = self._trees.get((salt, block_size))
            if tree is not None:
                for num_blocks, bits in tree.match(prompt_ids):
                    for name in self._holders.names(bits):
                        hits[name] = num_blocks * block_size
        return hits

    # --- what workers tell ----------------------------------------------------------------------------

    def apply(self, name: str, run: CacheEvents) -> bool:
        """Take in a run of events; one seen before changes nothing.

        False, once per gap: events are missing (or make no sense), so ask the worker for a snapshot. Until `restore`
        its index counts as empty, and events are kept for afterwards.
        """
        worker = self._workers.get(name)
        if worker is None:
            return True  # it left while this was on its way
        if worker.early is not None:
            return worker.early.add(run)
        if self._apply_run(worker, run):
            return True
        self._lose(worker).add(run)
        return False

    def restore(self, name: str, snapshot: CacheSnapshot) -> Generator[None, None, bool]:
        """Replace what is known of a worker; an old snapshot changes nothing. Returns False as `apply` does.

        A snapshot may be large: this yields after every small part of the work, and nothing else may be told of the
        worker until it is done.
        """
        worker = self._workers.get(name)
        if worker is None or (worker.early is None and snapshot.next_seq <= worker.next_seq):
            return True
        early = worker.early.in_order() if worker.early is not None else []
        self._clear_blocks(worker)
        worker.early = None
        worker.next_seq = snapshot.next_seq
        for stored in snapshot.stored:
            if not self._store(worker, stored):
                self._lose(worker)
                return False
            yield
        is_complete = True
        for run in early:  # behind another gap they are kept again
            is_complete &= self.apply(name, run)
            yield
        return is_complete

    def _apply_run(self, worker: _Worker, run: CacheEvents) -> bool:
        known = worker.next_seq - run.first_seq  # how many of these events were applied before
        if known < 0:
            return False
        for event in run.events[known:]:
            if not self._apply_event(worker, event):
                return False
            worker.next_seq += 1
        return True

    def _apply_event(self, worker: _Worker, event: CacheEvent) -> bool:
        match event:
            case BlocksStored():
                return self._store(worker, event)
            case BlocksRemoved():
                for first_key, last_key in key_ranges(event.keys):
                    self._remove(worker, first_key, last_key)
            case CacheCleared():
                self._forget_blocks(worker)
        return True

    def _lose(self, worker: _Worker) -> EarlyEvents:
        self._forget_blocks(worker)
        worker.early = EarlyEvents()
        return worker.early

    def _store(self, worker: _Worker, stored: BlocksStored) -> bool:
        """False if the parent is unknown, a key is not new, or the tokens do not fit the keys."""
        block_bytes = worker.block_size * TOKEN_BYTES
        if len(stored.token_ids) != len(stored.keys) * block_bytes:
            return False
        parent_key, position = stored.parent_key, 0
        for first_key, count in ascending_runs(stored.keys):
            tokens = stored.token_ids[position : position + count * block_bytes]
            if not self._store_run(worker, stored.salt, parent_key, first_key, count, tokens):
                return False
            parent_key = first_key + count - 1
            position += count * block_bytes
        if self._memory.num_bytes > self._limit_bytes:
            self._keep_bound()
        return True

    def _store_run(
        self, worker: _Worker, salt: str, parent_key: int, first_key: int, count: int, tokens: bytes
    ) -> bool:
        last_key = first_key + count - 1
        if first_key <= ROOT or worker.runs.within(first_key, last_key):
            return False
        if parent_key == ROOT:
            tree = self._trees.get((salt, worker.block_size)) or self._add_tree(salt, worker.block_size)
            edge = tree.insert(tree.root, 0, tokens, worker.bit)
            self._add_run(worker, Run(tree, first_key, 0, count, edge))
            return True
        parent = worker.runs.find(parent_key)
        if parent is None:
            return worker.is_cut
        above, depth = parent.place(parent_key)
        edge = parent.tree.insert(above, depth + 1, tokens, worker.bit)
        if first_key == parent_key + 1:  # a new key, so the parent is the last of its run
            parent.extend(count, edge)
        else:
            self._add_run(worker, Run(parent.tree, first_key, depth + 1, count, edge))
        return True

    def _add_run(self, worker: _Worker, run: Run) -> None:
        worker.runs.add(run)
        self._memory.num_bytes += RUN_BYTES

    def _remove(self, worker: _Worker, first_key: int, last_key: int) -> None:
        """Take the blocks with these keys out; keys that are not known are none of the cache's any more."""
        for run in worker.runs.within(first_key, last_key):
            self._take(worker, run, first_key, last_key)

    def _take(self, worker: _Worker, run: Run, first_key: int, last_key: int) -> int:
        """Take these blocks out of a run; how many they were."""
        taken = run.take(first_key, last_key)
        run.tree.drop(run.edge, run.first, taken, worker.bit)
        if run.live:
            run.let_go()
        else:
            worker.runs.remove(run)
            self._memory.num_bytes -= RUN_BYTES
            if run.tree.is_empty:
                self._drop_tree(run.tree)
        return taken.bit_count()

    def _clear_blocks(self, worker: _Worker) -> None:
        """What the worker told of its cache is void."""
        for run in worker.runs:
            run.tree.drop(run.edge, run.first, run.live, worker.bit)
            if run.tree.is_empty:
                self._drop_tree(run.tree)
        self._memory.num_bytes -= RUN_BYTES * len(worker.runs)
        worker.runs.clear()
        worker.is_cut = False

    def _forget_blocks(self, worker: _Worker) -> None:
        """The cache is empty, or unknown; what earlier plans expected of it went with it."""
        self._clear_blocks(worker)
        for handle in list(worker.expected):
            self.withdraw(worker.name, handle)

    # --- what plans expect ----------------------------------------------------------------------------

    def expect(self, name: str, salt: str, prompt_ids: bytes, expires_at: float) -> int:
        """The worker will soon hold this prompt's full blocks; counts as held until withdrawn or expired.

        Returns a handle for `withdraw`.
        """
        worker = self._workers[name]
        handle = self._last_handle = self._last_handle + 1
        block_bytes = worker.block_size * TOKEN_BYTES
        count = len(prompt_ids) // block_bytes
        if count:
            tree = self._trees.get((salt, worker.block_size)) or self._add_tree(salt, worker.block_size)
            edge = tree.insert(tree.root, 0, prompt_ids[: count * block_bytes], worker.expected_bit)
            worker.expected[handle] = _Expected(tree, edge, count)
            heapq.heappush(self._expiries, (expires_at, handle, name))
            self._memory.num_bytes += PLAN_BYTES
            if self._memory.num_bytes > self._limit_bytes:
                self._keep_bound()
        return handle

    def withdraw(self, name: str, handle: int) -> None:
        """That expectation is void. Already over, or the worker gone: no-op."""
        worker = self._workers.get(name)
        if worker is None or handle not in worker.expected:
            return
        expected = worker.expected.pop(handle)
        self._memory.num_bytes -= PLAN_BYTES
        tree = expected.tree
        tree.drop(expected.edge, 0, (1 << expected.count) - 1, worker.expected_bit)
        if not tree.root.children:
            self._drop_tree(tree)

    def expire(self, now: float) -> None:
        """End the expectations whose time has come."""
        expiries = self._expiries
        while expiries and expiries[0][0] <= now:
            _, handle, name = heapq.heappop(expiries)
            self.withdraw(name, handle)

    # --- the memory bound -----------------------------------------------------------------------------

    def _keep_bound(self) -> None:
        """Drop until the rest fits; what plans expect only when nothing else is left."""
        while self._memory.num_bytes > self._limit_bytes:
            holders = [worker for worker in self._workers.values() if len(worker.runs)]
            if holders:
                self._drop_least_used(holders)
            elif self._expiries:
                _, handle, name = heapq.heappop(self._expiries)
                self.withdraw(name, handle)
            else:
                return

    def _drop_least_used(self, holders: list[_Worker]) -> None:
        """One run's blocks on its last edge. No edge is used later than those above it, so leaves go first."""
        drawn = []
        for worker in self._random.choices(holders, k=DRAWN_RUNS):
            run = worker.runs[self._random.randrange(len(worker.runs))]
            run.let_go()
            drawn.append((run.edge.used, -run.edge.start, worker, run))
        _, _, worker, run = min(drawn, key=lambda entry: entry[:2])
        first_key = max(run.first_key, run.first_key + run.edge.start - run.first)
        self.dropped_blocks += self._take(worker, run, first_key, run.end_key - 1)
        worker.is_cut = True

    # --- trees ----------------------------------------------------------------------------------------

    def _note_block_sizes(self) -> None:
        self._block_sizes = tuple({worker.block_size for worker in self._workers.values()})

    def _add_tree(self, salt: str, block_size: int) -> RadixTree:
        tree = self._trees[salt, block_size] = RadixTree(salt, block_size * TOKEN_BYTES, self._memory)
        self._memory.num_bytes += TREE_BYTES
        return tree

    def _drop_tree(self, tree: RadixTree) -> None:
        place = tree.salt, tree.block_bytes // TOKEN_BYTES
        if self._trees.get(place) is tree:
            del self._trees[place]
            self._memory.num_bytes -= TREE_BYTES
