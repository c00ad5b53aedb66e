"""Faults of event streams and workers, one by one; test_prefix_index_model.py has the rest."""

from __future__ import annotations

from random import Random

import pytest
from cache_model import CacheModel, outcome

from dynrt.planner.early_events import MAX_EVENTS
from dynrt.planner.events import ROOT, BlocksRemoved, BlocksStored, CacheCleared, CacheEvents, CacheSnapshot
from dynrt.planner.prefix_index import PrefixIndex
from dynrt.runtime.messages import pack_ids

SIZE = 4
PROMPT = list(range(100, 116))  # four blocks
PACKED = pack_ids(PROMPT)


def stored(parent: int, keys: list[int], token_ids: list[int], salt: str = "") -> BlocksStored:
    return BlocksStored(parent, keys, pack_ids(token_ids), salt)


@pytest.fixture
def index() -> PrefixIndex:
    index = PrefixIndex(Random(0))
    index.add_worker("a", SIZE)
    index.add_worker("b", SIZE)
    return index


def test_whole_blocks_hit_and_the_rest_does_not(index: PrefixIndex) -> None:
    assert index.apply("a", CacheEvents(0, [stored(ROOT, [1, 2, 3, 4], PROMPT)]))
    assert index.match("", PACKED) == {"a": 16}
    assert index.match("", pack_ids(PROMPT[:7])) == {"a": 4}
    assert index.match("", pack_ids(PROMPT[:3])) == {}


def test_salts_never_share(index: PrefixIndex) -> None:
    index.apply("a", CacheEvents(0, [stored(ROOT, [1], PROMPT[:4], "tenant")]))
    assert index.match("", PACKED) == {}
    assert index.match("tenant", PACKED) == {"a": 4}


def test_children_take_the_salt_of_their_parent(index: PrefixIndex) -> None:
    index.apply("a", CacheEvents(0, [stored(ROOT, [1], PROMPT[:4], "tenant"), stored(1, [2], PROMPT[4:8])]))
    assert index.match("tenant", PACKED) == {"a": 8}


def test_workers_have_block_sizes_of_their_own(index: PrefixIndex) -> None:
    index.add_worker("big", 8)
    index.apply("a", CacheEvents(0, [stored(ROOT, [1, 2, 3], PROMPT[:12])]))
    index.apply("big", CacheEvents(0, [stored(ROOT, [1], PROMPT[:8])]))
    assert index.match("", PACKED) == {"a": 12, "big": 8}


def test_a_restart_under_the_same_id_starts_from_nothing_and_number_zero(index: PrefixIndex) -> None:
    index.apply("a", CacheEvents(0, [stored(ROOT, [1, 2], PROMPT[:8])]))
    index.add_worker("a", SIZE)
    assert index.match("", PACKED) == {}
    assert index.apply("a", CacheEvents(0, [stored(ROOT, [1], PROMPT[:4])]))
    assert index.match("", PACKED) == {"a": 4}


def test_a_duplicate_or_overlapping_run_counts_once(index: PrefixIndex) -> None:
    first, second = stored(ROOT, [1], PROMPT[:4]), stored(1, [2], PROMPT[4:8])
    index.apply("a", CacheEvents(0, [first]))
    assert index.apply("a", CacheEvents(0, [first, second]))
    assert index.apply("a", CacheEvents(1, [second]))
    index.apply("a", CacheEvents(2, [BlocksRemoved([2])]))
    assert index.match("", PACKED) == {"a": 4}


def test_a_gap_empties_until_the_snapshot_and_is_reported_once(index: PrefixIndex) -> None:
    index.apply("a", CacheEvents(0, [stored(ROOT, [1], PROMPT[:4])]))
    assert not index.apply("a", CacheEvents(2, [stored(2, [3], PROMPT[8:12])]))
    assert index.apply("a", CacheEvents(3, [stored(3, [4], PROMPT[12:])]))
    assert index.match("", PACKED) == {} and index.incomplete_workers == ["a"]
    snapshot = CacheSnapshot(3, [stored(ROOT, [1, 2, 3], PROMPT[:12])])
    assert outcome(index.restore("a", snapshot))
    assert index.match("", PACKED) == {"a": 16} and index.incomplete_workers == []


def test_events_that_arrive_out_of_order_are_put_in_order_behind_the_snapshot(index: PrefixIndex) -> None:
    assert not index.apply("a", CacheEvents(2, [stored(2, [3], PROMPT[8:12])]))
    assert index.apply("a", CacheEvents(1, [stored(1, [2], PROMPT[4:8])]))
    assert outcome(index.restore("a", CacheSnapshot(1, [stored(ROOT, [1], PROMPT[:4])])))
    assert index.match("", PACKED) == {"a": 12}


def test_a_snapshot_too_old_to_close_the_gap_asks_for_another(index: PrefixIndex) -> None:
    assert not index.apply("a", CacheEvents(5, [stored(ROOT, [9], PROMPT[:4])]))
    assert not outcome(index.restore("a", CacheSnapshot(3, [])))
    assert outcome(index.restore("a", CacheSnapshot(5, [])))
    assert index.match("", PACKED) == {"a": 4}


def test_a_late_snapshot_takes_nothing_back(index: PrefixIndex) -> None:
    index.apply("a", CacheEvents(0, [stored(ROOT, [1], PROMPT[:4]), stored(1, [2], PROMPT[4:8])]))
    assert outcome(index.restore("a", CacheSnapshot(1, [stored(ROOT, [1], PROMPT[:4])])))
    assert index.match("", PACKED) == {"a": 8}


@pytest.mark.parametrize(
    "nonsense",
    [
        stored(77, [2], PROMPT[4:8]),
        stored(1, [2, 3], PROMPT[4:8]),
        stored(1, [1], PROMPT[4:8]),
        stored(ROOT, [ROOT], PROMPT[:4]),
    ],
    ids=["unknown parent", "tokens do not fit the keys", "key used before", "key of the root"],
)
def test_an_event_that_makes_no_sense_is_a_gap(index: PrefixIndex, nonsense: BlocksStored) -> None:
    index.apply("a", CacheEvents(0, [stored(ROOT, [1], PROMPT[:4])]))
    assert not index.apply("a", CacheEvents(1, [nonsense]))
    assert index.match("", PACKED) == {} and index.incomplete_workers == ["a"]


def test_a_cleared_cache_is_empty_and_so_are_the_plans_made_before(index: PrefixIndex) -> None:
    index.apply("a", CacheEvents(0, [stored(ROOT, [1, 2], PROMPT[:8])]))
    index.expect("a", "", PACKED, expires_at=5)
    index.apply("a", CacheEvents(1, [CacheCleared()]))
    assert index.match("", PACKED) == {} and index.is_empty


def test_events_held_back_are_bounded(index: PrefixIndex) -> None:
    events = [BlocksRemoved([1])] * (MAX_EVENTS // 2)
    assert not index.apply("a", CacheEvents(1, list(events)))
    assert index.apply("a", CacheEvents(1 + len(events), list(events)))
    last = CacheEvents(1 + 2 * len(events), [stored(ROOT, [1], PROMPT[:4])])
    assert not index.apply("a", last), "a newer snapshot is needed"
    assert outcome(index.restore("a", CacheSnapshot(last.first_seq, [])))
    assert index.match("", PACKED) == {"a": 4}


def test_one_shared_first_block_is_removed_per_worker(index: PrefixIndex) -> None:
    for worker in ("a", "b"):
        tails = [stored(1, [key], [key] * SIZE) for key in range(2, 8)]
        index.apply(worker, CacheEvents(0, [stored(ROOT, [1], PROMPT[:4]), *tails]))
    index.apply("a", CacheEvents(7, [BlocksRemoved([2, 1])]))
    assert index.match("", pack_ids([*PROMPT[:4], *[2] * SIZE])) == {"b": 8}
    index.drop_worker("b")
    assert index.match("", PACKED) == {}


def test_a_plan_counts_until_it_expires_or_is_withdrawn(index: PrefixIndex) -> None:
    handle = index.expect("a", "", PACKED, expires_at=5)
    index.expect("b", "", pack_ids(PROMPT[:8]), expires_at=9)
    assert index.match("", PACKED) == {"a": 16, "b": 8}
    index.withdraw("a", handle)
    assert index.match("", PACKED) == {"b": 8}
    index.expire(8.9)
    assert index.match("", PACKED) == {"b": 8}
    index.expire(9)
    assert index.match("", PACKED) == {} and index.is_empty


def test_withdrawing_one_sibling_leaves_the_other_its_prefix(index: PrefixIndex) -> None:
    handle = index.expect("a", "", PACKED, expires_at=5)
    index.expect("a", "", pack_ids([*PROMPT[:8], 1, 1, 1, 1]), expires_at=5)
    index.withdraw("a", handle)
    assert index.match("", PACKED) == {"a": 8}


def test_what_a_plan_of_a_dead_incarnation_expected_is_gone(index: PrefixIndex) -> None:
    handle = index.expect("a", "", PACKED, expires_at=5)
    index.add_worker("a", SIZE)
    assert index.match("", PACKED) == {}
    index.expect("a", "", PACKED, expires_at=9)
    index.withdraw("a", handle)
    index.expire(5)
    assert index.match("", PACKED) == {"a": 16}


def test_news_of_a_worker_that_left_changes_nothing(index: PrefixIndex) -> None:
    index.drop_worker("a")
    assert index.apply("a", CacheEvents(0, [stored(ROOT, [1], PROMPT[:4])]))
    assert outcome(index.restore("a", CacheSnapshot(0, [])))
    assert index.match("", PACKED) == {} and index.is_empty


def test_worker_churn_leaves_nothing_behind() -> None:
    index = PrefixIndex(Random(0))
    for round_number in range(50):
        index.add_worker("x", SIZE)
        cache = CacheModel(SIZE)
        index.apply("x", cache.run(cache.store(ROOT, PROMPT, salt=str(round_number))))
        assert index.match(str(round_number), PACKED) == {"x": 16}
        index.drop_worker("x")
    assert index.is_empty
