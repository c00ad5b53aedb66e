"""The block pool: reference counts, exact prefix hits, eviction, events."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dynrt.engines.scheduling.block_pool import BlockPool
from dynrt.planner.events import ROOT, BlocksRemoved, BlocksStored
from dynrt.runtime.messages import pack_ids


def fill(pool: BlockPool, token_ids: list[int], salt: str = "") -> list[int]:
    """Hold blocks for these tokens as a sequence does: hit, allocate, store the full ones."""
    hit = pool.lookup(token_ids, salt)
    pool.acquire(hit)
    block_ids = hit + pool.allocate(pool.blocks_for(len(token_ids)) - len(hit))
    first, end = len(hit), len(token_ids) // pool.block_size
    tokens = token_ids[first * pool.block_size : end * pool.block_size]
    stored = pool.store(block_ids[first:end], tokens, block_ids[first - 1] if first else None, salt)
    return block_ids[:first] + stored + block_ids[end:]


def test_full_blocks_are_found_again_and_a_partly_filled_one_is_freed() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    block_ids = fill(pool, [1, 2, 3, 4, 5])
    pool.release(block_ids)
    assert (pool.num_active, pool.num_cached, pool.num_free) == (0, 2, 2)
    assert pool.lookup([1, 2, 3, 4, 5], "") == block_ids[:2]
    assert pool.lookup([1, 2, 3], "") == block_ids[:1]
    assert pool.lookup([2, 2, 3, 4], "") == []


def test_same_tokens_below_another_parent_or_salt_are_no_hit() -> None:
    pool = BlockPool(num_blocks=8, block_size=2)
    pool.release(fill(pool, [1, 1, 2, 2], "tenant a"))
    assert pool.lookup([1, 1, 2, 2], "tenant b") == []
    assert pool.lookup([2, 2], "tenant a") == []


def test_eviction_takes_the_least_recently_released_leaf_first() -> None:
    pool = BlockPool(num_blocks=4, block_size=1)
    old, new = fill(pool, [1, 2]), fill(pool, [3, 4])
    pool.release(old)
    pool.release(new)
    pool.take_events()
    assert pool.allocate(3) == sorted([old[1], old[0], new[1]])
    assert pool.take_events() == [BlocksRemoved([2, 1, 4])]
    assert pool.lookup([1, 2], "") == []
    assert pool.lookup([3, 4], "") == new[:1]


def test_blocks_in_use_are_not_to_be_had() -> None:
    pool = BlockPool(num_blocks=3, block_size=1)
    held = fill(pool, [1, 2])
    assert pool.num_available == 1
    with pytest.raises(AssertionError):
        pool.allocate(2)
    pool.release(held)
    assert pool.num_available == 3


def test_a_block_computed_twice_is_exchanged_for_the_cached_one() -> None:
    pool = BlockPool(num_blocks=6, block_size=1)
    first, second = pool.allocate(2), pool.allocate(3)
    assert pool.store(first, [7, 8], None, "") == first
    assert pool.store(second, [7, 8, 9], None, "") == [*first, second[2]]
    assert pool.num_active == 3
    pool.release(first)
    pool.release([*first, second[2]])
    assert pool.lookup([7, 8, 9], "") == [*first, second[2]]


def test_events_name_parents_and_join_consecutive_blocks() -> None:
    pool = BlockPool(num_blocks=4, block_size=2)
    pool.release(fill(pool, [1, 2, 3, 4], "x"))
    fill(pool, [1, 2, 3, 4, 5, 6], "x")
    stored = [
        BlocksStored(ROOT, [1, 2], pack_ids([1, 2, 3, 4]), "x"),
        BlocksStored(2, [3], pack_ids([5, 6]), "x"),
    ]
    assert pool.take_events() == stored
    assert not pool.has_events()
    assert pool.snapshot() == [BlocksStored(ROOT, [1, 2, 3], pack_ids([1, 2, 3, 4, 5, 6]), "x")]


def test_misuse_is_caught() -> None:
    pool = BlockPool(num_blocks=2, block_size=1)
    [block_id] = pool.allocate(1)
    pool.release([block_id])
    with pytest.raises(AssertionError, match="held by nobody"):
        pool.release([block_id])
    with pytest.raises(AssertionError, match="is free"):
        pool.acquire([block_id])


Path = tuple[str, tuple[int, ...]]  # salt, and all tokens up to a block's end


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, are pinned in part, and go, next to a model that remembers what each block contains."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(num_blocks=9, block_size=2)
        self.held: list[list[int]] = []
        self.contents: dict[int, Path] = {}  # block id -> what was written there
        self.index: dict[int, tuple[int, bytes, str]] = {}  # fed by the events alone
        self.keys_seen: set[int] = set()

    @rule(
        token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=10),
        salt=st.sampled_from(["", "a"]),
        private=st.booleans(),
    )
    def open(self, token_ids: list[int], salt: str, private: bool) -> None:
        """`private`: do not look for a hit, as a sequence that began before the content was cached."""
        hit = [] if private else self.pool.lookup(token_ids, salt)
        assert [self.contents[block_id] for block_id in hit] == self.paths(token_ids, salt)[: len(hit)]
        assert private or len(hit) == self.expected_hit(token_ids, salt)
        num_new = self.pool.blocks_for(len(token_ids)) - len(hit)
        if num_new + self.pool.count_unused(hit) > self.pool.num_available:
            return
        self.pool.acquire(hit)
        block_ids = hit + self.allocate(num_new)
        self.write(block_ids[len(hit) :], self.paths(token_ids, salt)[len(hit) :])
        self.held.append(self.store(block_ids, len(hit), token_ids, salt))

    def allocate(self, count: int) -> list[int]:
        in_use = {block_id for block_ids in self.held for block_id in block_ids}
        block_ids = self.pool.allocate(count)
        assert len(set(block_ids)) == count and in_use.isdisjoint(block_ids)
        return block_ids

    def write(self, block_ids: list[int], paths: list[Path]) -> None:
        for block_id in block_ids:
            self.contents.pop(block_id, None)
        self.contents.update(zip(block_ids, paths, strict=False))

    def store(self, block_ids: list[int], first: int, token_ids: list[int], salt: str) -> list[int]:
        end = len(token_ids) // 2
        parent_id = block_ids[first - 1] if first else None
        stored = self.pool.store(block_ids[first:end], token_ids[first * 2 : end * 2], parent_id, salt)
        table = block_ids[:first] + stored + block_ids[end:]
        assert [self.contents[block_id] for block_id in table[:end]] == self.paths(token_ids, salt)
        return table

    def paths(self, token_ids: list[int], salt: str) -> list[Path]:
        return [(salt, tuple(token_ids[:end])) for end in range(2, len(token_ids) + 1, 2)]

    def expected_hit(self, token_ids: list[int], salt: str) -> int:
        self.follow_events()
        below = {place: key for key, place in self.index.items()}
        parent, count = ROOT, 0
        for start in range(0, len(token_ids) - 1, 2):
            found = below.get((parent, pack_ids(token_ids[start : start + 2]), salt))
            if found is None:
                break
            parent, count = found, count + 1
        return count

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def pin_prefix(self, data: Any) -> None:
        block_ids = data.draw(st.sampled_from(self.held))
        prefix = block_ids[: data.draw(st.integers(1, len(block_ids)))]
        self.pool.acquire(prefix)
        self.held.append(prefix)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def close(self, data: Any) -> None:
        block_ids = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.pool.release(block_ids)

    def follow_events(self) -> None:
        for event in self.pool.take_events():
            match event:
                case BlocksStored(parent, keys, packed, salt):
                    assert self.keys_seen.isdisjoint(keys), "a key was used twice"
                    assert parent == ROOT or parent in self.index, "a child was stored below nothing"
                    self.keys_seen.update(keys)
                    parents = [parent, *keys[:-1]]
                    for i, (key, below) in enumerate(zip(keys, parents, strict=True)):
                        self.index[key] = below, packed[8 * i : 8 * i + 8], salt
                case BlocksRemoved(keys):
                    for key in keys:
                        del self.index[key]
                    orphans = [key for key, place in self.index.items() if place[0] in keys]
                    assert not orphans, "a child outlived its parent"

    @invariant()
    def counts_agree(self) -> None:
        holders = Counter(block_id for block_ids in self.held for block_id in block_ids)
        assert self.pool.num_active == len(holders)
        assert self.pool.num_active + self.pool.num_cached + self.pool.num_free == self.pool.num_blocks

    @invariant()
    def snapshot_is_what_the_events_told(self) -> None:
        self.follow_events()
        assert read_snapshot(self.pool.snapshot()) == self.index

    def teardown(self) -> None:
        for block_ids in self.held:
            self.pool.release(block_ids)
        assert self.pool.num_active == 0
        self.pool.allocate(self.pool.num_blocks)
        assert self.pool.num_cached == 0 and self.pool.snapshot() == []


def read_snapshot(snapshot: list[BlocksStored]) -> dict[int, tuple[int, bytes, str]]:
    """Read in its order, so parents must come first."""
    index: dict[int, tuple[int, bytes, str]] = {}
    for stored in snapshot:
        assert stored.parent_key == ROOT or stored.parent_key in index
        parents = [stored.parent_key, *stored.keys[:-1]]
        for i, (key, parent) in enumerate(zip(stored.keys, parents, strict=True)):
            index[key] = parent, stored.token_ids[8 * i : 8 * i + 8], stored.salt
    return index


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40)
