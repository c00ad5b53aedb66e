"""Whatever workers do and however their events arrive, the index says what a dict of sets would."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from random import Random

from cache_model import CacheModel, Held, all_blocks, hit_tokens, outcome
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynrt.planner.events import ROOT, CacheEvents, CacheSnapshot
from dynrt.planner.prefix_index import DEFAULT_LIMIT_BYTES, PrefixIndex
from dynrt.runtime.messages import pack_ids

WORKERS = ("a", "b", "c")
SALTS = ("", "tenant")
PROMPT_TOKENS = 5
PROMPTS = list(product((1, 2), repeat=PROMPT_TOKENS))

tokens = st.sampled_from((1, 1, 1, 2))  # paths mostly run together
on_time = st.sampled_from((True,) * 7 + (False,))
workers = st.sampled_from(WORKERS)
salts = st.sampled_from(SALTS)


@dataclass
class Told:
    """One worker: its cache, the runs on their way, and what the index must have made of those that arrived."""

    cache: CacheModel
    sent: list[CacheEvents] = field(default_factory=list)
    waiting: list[CacheEvents] = field(default_factory=list)  # sent, not arrived
    cursor: int = 0
    early: list[CacheEvents] | None = None

    def arrives(self, run: CacheEvents) -> bool:
        if self.early is not None:
            self.early.append(run)
            return True
        if run.first_seq > self.cursor:
            self.early = [run]
            return False
        self.cursor = max(self.cursor, run.first_seq + len(run.events))
        return True

    def snapshot_arrives(self, snapshot: CacheSnapshot) -> bool:
        if self.early is None and snapshot.next_seq <= self.cursor:
            return True
        early, self.early = sorted(self.early or [], key=lambda run: run.first_seq), None
        self.cursor = snapshot.next_seq
        return [self.arrives(run) for run in early].count(False) == 0

    @property
    def held(self) -> Held:
        return self.cache.history[self.cursor] if self.early is None else frozenset()


class IndexMachine(RuleBasedStateMachine):
    limit_bytes = DEFAULT_LIMIT_BYTES  # never reached

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(Random(0), self.limit_bytes)
        self.told: dict[str, Told] = {}
        self.expected: dict[tuple[str, int], tuple[float, str, tuple[int, ...]]] = {}
        self.now = 0.0

    @rule(worker=workers, block_size=st.sampled_from((1, 1, 2)))
    def joins_or_restarts(self, worker: str, block_size: int) -> None:
        self.index.add_worker(worker, block_size)
        self.told[worker] = Told(CacheModel(block_size))
        self._forget_expected(worker)

    @rule(worker=workers)
    def leaves(self, worker: str) -> None:
        self.index.drop_worker(worker)
        self.told.pop(worker, None)
        self._forget_expected(worker)

    @precondition(lambda self: self.told)
    @rule(
        data=st.data(),
        count=st.integers(1, 5),
        salt=salts,
        skip_keys=st.sampled_from((0, 0, 1)),
        on_time=on_time,
    )
    def stores(self, data: st.DataObject, count: int, salt: str, skip_keys: int, on_time: bool) -> None:
        name = self._any(data)
        cache = self.told[name].cache
        parent = data.draw(st.sampled_from([ROOT, *cache.blocks]))
        size = count * cache.block_size
        token_ids = data.draw(st.lists(tokens, min_size=size, max_size=size))
        self._send(name, on_time, cache.run(cache.store(parent, token_ids, salt, skip_keys)))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), count=st.integers(1, 12), on_time=on_time)
    def evicts_leaves(self, data: st.DataObject, count: int, on_time: bool) -> None:
        name = self._any(data)
        cache = self.told[name].cache
        keys = cache.leaves_first()[:count]
        self._send(name, on_time, cache.run(cache.remove(keys)))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), on_time=on_time)
    def evicts_anything(self, data: st.DataObject, on_time: bool) -> None:
        name = self._any(data)
        cache = self.told[name].cache
        keys = data.draw(st.lists(st.sampled_from([99, *cache.blocks]), max_size=4))
        self._send(name, on_time, cache.run(cache.remove(keys)))

    @precondition(lambda self: self.told)
    @rule(data=st.data(), on_time=on_time)
    def clears(self, data: st.DataObject, on_time: bool) -> None:
        name = self._any(data)
        cache = self.told[name].cache
        self._send(name, on_time, cache.run(cache.clear()))

    @precondition(lambda self: any(told.waiting for told in self.told.values()))
    @rule(data=st.data())
    def next_run_arrives(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, told in self.told.items() if told.waiting]))
        self._arrives(name, self.told[name].waiting.pop(0))

    @precondition(lambda self: any(told.sent for told in self.told.values()))
    @rule(data=st.data())
    def any_run_arrives(self, data: st.DataObject) -> None:
        """Out of order, or again."""
        name = data.draw(st.sampled_from([name for name, told in self.told.items() if told.sent]))
        run = data.draw(st.sampled_from(self.told[name].sent))
        if run in self.told[name].waiting:
            self.told[name].waiting.remove(run)
        self._arrives(name, run)

    @precondition(lambda self: any(told.waiting for told in self.told.values()))
    @rule(data=st.data())
    def run_is_lost(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([name for name, told in self.told.items() if told.waiting]))
        self.told[name].waiting.pop(0)

    @precondition(lambda self: any(not told.cache.has_holes() for told in self.told.values()))
    @rule(data=st.data())
    def snapshot_arrives(self, data: st.DataObject) -> None:
        whole = [name for name, told in self.told.items() if not told.cache.has_holes()]
        name = data.draw(st.sampled_from(whole))
        told = self.told[name]
        snapshot = told.cache.snapshot()
        in_step = told.snapshot_arrives(snapshot)
        assert outcome(self.index.restore(name, snapshot)) == in_step
        if not in_step:
            self._forget_expected(name)

    @precondition(lambda self: self.told)
    @rule(data=st.data(), salt=salts, prompt=st.sampled_from(PROMPTS), lifetime=st.integers(1, 9))
    def plan_is_made(self, data: st.DataObject, salt: str, prompt: tuple[int, ...], lifetime: int) -> None:
        name = data.draw(st.sampled_from(list(self.told)))
        prompt = prompt[: data.draw(st.integers(0, PROMPT_TOKENS))]
        handle = self.index.expect(name, salt, pack_ids(prompt), self.now + lifetime)
        self.expected[name, handle] = (self.now + lifetime, salt, prompt)

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def plan_is_withdrawn(self, data: st.DataObject) -> None:
        name, handle = data.draw(st.sampled_from(list(self.expected)))
        del self.expected[name, handle]
        self.index.withdraw(name, handle)
        self.index.withdraw(name, handle)

    @rule(duration=st.integers(1, 5))
    def time_passes(self, duration: int) -> None:
        self.now += duration
        self.index.expire(self.now)
        self.expected = {entry: plan for entry, plan in self.expected.items() if plan[0] > self.now}

    @invariant()
    def says_what_the_sets_say(self) -> None:
        incomplete = {name for name, told in self.told.items() if told.early is not None}
        assert set(self.index.incomplete_workers) == incomplete
        sets = [(name, told.cache.block_size, self._sets(name)) for name, told in self.told.items()]
        for salt, prompt in product(SALTS, PROMPTS):
            hits = {
                name: max(hit_tokens(held, salt, prompt, block_size) for held in held_sets)
                for name, block_size, held_sets in sets
            }
            hits = {name: hit for name, hit in hits.items() if hit}
            self._check(self.index.match(salt, pack_ids(prompt)), hits)

    def _check(self, found: dict[str, int], held: dict[str, int]) -> None:
        assert found == held
        assert self.index.dropped_blocks == 0

    def teardown(self) -> None:
        for name in list(self.told):
            self.leaves(name)
        assert self.index.is_empty
        assert self.index.num_bytes == 0

    def _any(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(list(self.told)))

    def _send(self, name: str, on_time: bool, run: CacheEvents) -> None:
        """On time: it arrives at once, behind all that was sent before."""
        told = self.told[name]
        told.sent.append(run)
        told.waiting.append(run)
        while on_time and told.waiting:
            self._arrives(name, told.waiting.pop(0))

    def _arrives(self, name: str, run: CacheEvents) -> None:
        told = self.told[name]
        before = told.cursor
        in_step = told.arrives(run)
        assert self.index.apply(name, run) == in_step
        if not in_step or self._cleared(run, before, told):
            self._forget_expected(name)

    def _cleared(self, run: CacheEvents, before: int, told: Told) -> bool:
        return told.early is None and told.cursor > before and "CacheCleared" in repr(run.events)

    def _forget_expected(self, worker: str) -> None:
        self.expected = {entry: plan for entry, plan in self.expected.items() if entry[0] != worker}

    def _sets(self, worker: str) -> list[Held]:
        """What the worker told, and what its plans let expect: the better of the two counts."""
        told = self.told[worker]
        plans = [plan for (name, _), plan in self.expected.items() if name == worker]
        expected = (all_blocks(salt, prompt, told.cache.block_size) for _, salt, prompt in plans)
        return [told.held, frozenset().union(*expected)]


class BoundedIndexMachine(IndexMachine):
    """At the memory bound the index knows less, but nothing wrong."""

    limit_bytes = 4_000  # a few edges

    def _check(self, found: dict[str, int], held: dict[str, int]) -> None:
        assert all(hit <= held.get(name, 0) for name, hit in found.items()), (found, held)
        assert self.index.num_bytes <= self.limit_bytes


TestPrefixIndexModel = IndexMachine.TestCase
TestPrefixIndexModel.settings = settings(max_examples=60, stateful_step_count=40)
TestBoundedPrefixIndexModel = BoundedIndexMachine.TestCase
TestBoundedPrefixIndexModel.settings = settings(max_examples=60, stateful_step_count=40)
