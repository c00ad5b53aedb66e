"""Both ends and the ledger together, in a world that reorders, loses, kills and delivers late."""

from __future__ import annotations

from handoff_world import World
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = st.integers(0, 2**32 - 1)
NUM_PROMPTS, NUM_TURNS = 12, 300


@settings(max_examples=100)
@given(SEEDS)
def test_undisturbed_every_handoff_with_room_commits(seed: int) -> None:
    World(seed, cancels=False).run(NUM_PROMPTS, NUM_TURNS)


@settings(max_examples=150)
@given(SEEDS)
def test_handoffs_end_and_leak_nothing_whatever_is_cancelled(seed: int) -> None:
    World(seed).run(NUM_PROMPTS, NUM_TURNS)


@settings(max_examples=150)
@given(SEEDS)
def test_failed_writes_between_living_workers_end_their_handoffs(seed: int) -> None:
    World(seed, failures=True).run(NUM_PROMPTS, NUM_TURNS)


@settings(max_examples=150)
@given(SEEDS)
def test_a_dead_worker_is_fenced_before_its_peers_free(seed: int) -> None:
    World(seed, deaths=True, failures=True).run(NUM_PROMPTS, NUM_TURNS)


@settings(max_examples=100)
@given(SEEDS)
def test_a_hung_worker_is_killed_and_fenced(seed: int) -> None:
    World(seed, hangs=True).run(NUM_PROMPTS, NUM_TURNS)


@settings(max_examples=100)
@given(SEEDS)
def test_a_write_that_never_ends_costs_its_sender_and_frees_nothing_before(seed: int) -> None:
    World(seed, stalls=True).run(NUM_PROMPTS, NUM_TURNS)


@settings(max_examples=50)
@given(SEEDS)
def test_finished_prompts_that_find_no_room_go_elsewhere(seed: int) -> None:
    World(seed, cancels=False, is_scarce=True).run(2 * NUM_PROMPTS, NUM_TURNS)


@settings(max_examples=80)
@given(SEEDS)
def test_what_goes_elsewhere_leaks_nothing_whoever_dies_or_leaves(seed: int) -> None:
    World(seed, deaths=True, hangs=True, failures=True, is_scarce=True).run(2 * NUM_PROMPTS, NUM_TURNS)


def test_the_world_shows_what_it_is_meant_to_show() -> None:
    """Undisturbed enough to commit, disturbed enough for every outcome and for late bytes to occur."""
    worlds = [World(seed, deaths=True, hangs=True, failures=True) for seed in range(40)]
    for world in worlds:
        world.run(NUM_PROMPTS, NUM_TURNS)
    outcomes = {outcome for world in worlds for outcome in world.outcomes.values()}
    assert outcomes == {"committed", "cancelled", "fenced", "failed"}
    assert sum(world.num_landed_late for world in worlds) > 10


def test_the_scarce_world_shows_what_it_is_meant_to_show() -> None:
    """Prompts that find room elsewhere, some at the second move, and some that never do."""
    worlds = [World(seed, cancels=False, is_scarce=True) for seed in range(40)]
    for world in worlds:
        world.run(2 * NUM_PROMPTS, NUM_TURNS)
    moved = [prompt for world in worlds for prompt in world.prompts.values() if prompt.moved_from]
    committed = {prompt.id for world in worlds for prompt in moved if prompt.id in world.committed}
    assert len(committed) > 10 and any(prompt.moved_from.moved_from for prompt in moved)
    assert any(prompt.id not in committed for prompt in moved)
