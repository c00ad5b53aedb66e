"""Other routers' rules, each at one decision that is theirs alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from dynrt.planner.routing_rules import RULES, Router
from dynrt.planner.traces import TraceRequest


class Held:
    """A cache that holds the first blocks of everything."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def match(self, block_ids: Sequence[int]) -> int:
        return min(self._num_blocks, len(block_ids))


def rule(name: str, *held_blocks: int) -> Router:
    return RULES[name]([Held(num_blocks) for num_blocks in held_blocks], Random(1))


def ask(number: int, num_blocks: int = 8, first_block: int = 0) -> TraceRequest:
    block_ids = [*range(first_block, first_block + num_blocks)]
    return TraceRequest(number, 0.0, 4 * num_blocks, 5, block_ids, block_tokens=4)


def chosen(router: Router, *requests: TraceRequest) -> list[int]:
    return [router.choose(request, 0.0) for request in requests]


def test_round_robin_takes_turns() -> None:
    assert chosen(rule("round-robin", 0, 8, 0), *map(ask, range(4))) == [0, 1, 2, 0]


def test_random_uses_every_worker() -> None:
    assert set(chosen(rule("random", 0, 8, 0), *map(ask, range(40)))) == {0, 1, 2}


def test_least_loaded_goes_by_open_requests_until_they_finish() -> None:
    router = rule("least-loaded", 8, 0)
    first, second = chosen(router, ask(0), ask(1))
    assert {first, second} == {0, 1}
    router.prefilled(ask(0), first)
    router.finished(ask(0), first)
    assert chosen(router, ask(2)) == [first]


def test_cache_aware_follows_what_it_sent_itself() -> None:
    router = rule("cache-aware", 0, 8)
    ours, other = chosen(router, ask(0), ask(1, first_block=100))
    assert {ours, other} == {0, 1}
    assert chosen(router, ask(2), ask(3, first_block=100)) == [ours, other]


def test_cache_aware_leaves_a_worker_that_has_far_more_open() -> None:
    router = rule("cache-aware", 0, 0)
    workers = chosen(router, *map(ask, range(66)))
    assert workers == [0] * 65 + [1]


@pytest.mark.parametrize("name", ["kv-formula", "ttft-a1", "ttft-a2", "ttft-a8"])
def test_a_hit_is_worth_waiting_for_only_so_long(name: str) -> None:
    """Until the first prompt is computed there, the worker that holds it loses to the idle one sooner or later."""
    router = rule(name, 6, 0)
    workers = chosen(router, *(ask(number, first_block=100 * number) for number in range(40)))
    assert workers[0] == 0
    assert 1 in workers


@pytest.mark.parametrize("name", RULES)
def test_nothing_is_left_of_requests_that_are_over(name: str) -> None:
    """Then the same choice is made again and again, but for lots and turns."""
    router = rule(name, 6, 0)
    for number in range(50):
        worker = router.choose(ask(number), 0.0)
        router.prefilled(ask(number), worker)
        router.finished(ask(number), worker)
        if name in ("kv-formula", "kv-formula-16", "ttft-a1", "ttft-a2", "ttft-a8"):
            assert worker == 0
