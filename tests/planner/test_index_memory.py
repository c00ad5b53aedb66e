"""The memory bound of the prefix index: what it counts is what is allocated, and the least used goes first."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Callable
from random import Random

import pytest
from cache_model import outcome

from dynrt.planner.events import ROOT, BlocksRemoved, BlocksStored, CacheCleared, CacheEvents, CacheSnapshot
from dynrt.planner.prefix_index import TOKEN_BYTES, PrefixIndex

SIZE = 16
BLOCK_BYTES = SIZE * TOKEN_BYTES
NO_LIMIT = 1 << 40

Fill = Callable[[PrefixIndex], None]


class Cache:
    """A worker that stores prompts, so many blocks an event."""

    def __init__(self, index: PrefixIndex, name: str) -> None:
        self.index = index
        self.name = name
        self.next_seq = 0
        self.next_key = 1
        index.add_worker(name, SIZE)

    def store(self, parent_key: int, tokens: bytes, blocks_an_event: int = 16, skipped_keys: int = 0) -> int:
        """The last block's key."""
        for start in range(0, len(tokens), blocks_an_event * BLOCK_BYTES):
            part = bytes(bytearray(tokens[start : start + blocks_an_event * BLOCK_BYTES]))  # as from a socket
            first_key = self.next_key + skipped_keys
            self.next_key = first_key + len(part) // BLOCK_BYTES
            keys = list(range(first_key, self.next_key))
            self.tell(BlocksStored(parent_key, keys, part))
            parent_key = keys[-1]
        return parent_key

    def tell(self, event: BlocksStored | BlocksRemoved | CacheCleared) -> None:
        assert self.index.apply(self.name, CacheEvents(self.next_seq, [event]))
        self.next_seq += 1


def prompt(random: Random, num_blocks: int) -> bytes:
    return random.randbytes(num_blocks * BLOCK_BYTES)


def shared_prompts(tail_blocks: int, tails: int, blocks_an_event: int = 16, skipped_keys: int = 0) -> Fill:
    def fill(index: PrefixIndex) -> None:
        random = Random(1)
        caches = [Cache(index, f"w{number}") for number in range(8)]
        system_prompts = [prompt(random, 64) for _ in range(10)]
        ends = [[cache.store(ROOT, tokens) for tokens in system_prompts] for cache in caches]
        for _ in range(tails):
            worker, chosen = random.randrange(8), random.randrange(10)
            tail = prompt(random, tail_blocks)
            caches[worker].store(ends[worker][chosen], tail, blocks_an_event, skipped_keys)

    return fill


def held_by_many(index: PrefixIndex) -> None:
    random = Random(1)
    caches = [Cache(index, f"w{number}") for number in range(64)]
    for _ in range(40):
        tokens = prompt(random, 100)
        for cache in caches:
            cache.store(ROOT, tokens[: random.randint(1, 100) * BLOCK_BYTES])


def expected_by_plans(index: PrefixIndex) -> None:
    random = Random(1)
    index.add_worker("w", SIZE)
    for number in range(3000):
        index.expect("w", "", prompt(random, random.randint(1, 10)), float(number))


def many_tenants(index: PrefixIndex) -> None:
    random = Random(1)
    index.add_worker("w", SIZE)
    for number in range(3000):
        stored = BlocksStored(ROOT, [number + 1], prompt(random, 1), f"tenant {number}")
        assert index.apply("w", CacheEvents(number, [stored]))


@pytest.mark.parametrize(
    "fill",
    [
        pytest.param(shared_prompts(192, 100), id="long tails"),
        pytest.param(shared_prompts(4, 2000), id="short tails"),
        pytest.param(shared_prompts(1, 5000), id="tails of one block"),
        pytest.param(shared_prompts(32, 200, blocks_an_event=1, skipped_keys=1), id="a run for each block"),
        held_by_many,
        expected_by_plans,
        many_tenants,
    ],
)
def test_what_is_counted_is_what_is_allocated(fill: Fill) -> None:
    index = PrefixIndex(Random(0), NO_LIMIT)
    gc.collect()
    tracemalloc.start()
    fill(index)
    gc.collect()
    allocated, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 * allocated <= index.num_bytes <= 1.25 * allocated


@pytest.mark.parametrize(
    "fill", [shared_prompts(32, 200, 1, 1), held_by_many, expected_by_plans, many_tenants]
)
def test_the_bound_holds(fill: Fill) -> None:
    index = PrefixIndex(Random(0), 200_000)
    fill(index)
    assert 100_000 < index.num_bytes <= 200_000


def test_what_is_matched_stays() -> None:
    random = Random(1)
    index = PrefixIndex(Random(0), 1_000_000)
    cache = Cache(index, "w")
    hot = prompt(random, 64)
    cache.store(ROOT, hot)
    cold = [prompt(random, 64) for _ in range(1000)]  # 4 MB
    for tokens in cold:
        cache.store(ROOT, tokens)
        assert index.match("", hot) == {"w": 64 * SIZE}
    kept = [bool(index.match("", tokens)) for tokens in cold]
    assert sum(kept[-100:]) > 60 and not any(kept[:500])
    assert index.dropped_blocks == 64 * kept.count(False)


def test_a_matched_prefix_outlives_what_was_stored_behind_it() -> None:
    random = Random(1)
    index = PrefixIndex(Random(0), 200_000)
    cache = Cache(index, "w")
    system_prompt = prompt(random, 8)
    cache.store(ROOT, system_prompt + prompt(random, 64))  # one run of keys
    for _ in range(200):
        cache.store(ROOT, prompt(random, 64))
        index.match("", system_prompt + prompt(random, 1))
    assert index.match("", system_prompt) == {"w": 8 * SIZE}


def test_what_a_worker_stores_below_dropped_blocks_is_not_held_and_no_fault() -> None:
    random = Random(1)
    index = PrefixIndex(Random(0), 10_000)
    cache = Cache(index, "w")
    first, more = prompt(random, 8), prompt(random, 8)
    end = cache.store(ROOT, first)
    for _ in range(40):
        cache.store(ROOT, prompt(random, 8))
    assert index.match("", first) == {}
    below = cache.store(end, more)
    cache.store(below, more)
    cache.tell(BlocksRemoved([1, 2, below]))
    assert index.match("", first + more) == {}
    assert index.incomplete_workers == []


def test_after_a_clear_an_unknown_parent_is_a_fault_again() -> None:
    random = Random(1)
    index = PrefixIndex(Random(0), 10_000)
    cache = Cache(index, "w")
    for _ in range(40):
        cache.store(ROOT, prompt(random, 8))
    cache.tell(CacheCleared())
    orphan = BlocksStored(1, [cache.next_key], prompt(random, 1))
    assert not index.apply("w", CacheEvents(cache.next_seq, [orphan]))


def test_a_snapshot_brings_dropped_blocks_back() -> None:
    random = Random(1)
    index = PrefixIndex(Random(0), 10_000)
    cache = Cache(index, "w")
    first = prompt(random, 8)
    cache.store(ROOT, first)
    for _ in range(40):
        cache.store(ROOT, prompt(random, 8))
    snapshot = CacheSnapshot(cache.next_seq + 1, [BlocksStored(ROOT, list(range(1, 9)), first)])
    assert outcome(index.restore("w", snapshot))
    assert index.match("", first) == {"w": 8 * SIZE}


def test_one_event_larger_than_the_bound_leaves_nothing() -> None:
    index = PrefixIndex(Random(0), 1000)
    Cache(index, "w").store(ROOT, prompt(Random(1), 16))
    assert index.is_empty and index.num_bytes == 0
