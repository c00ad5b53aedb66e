"""The workload of the index bench is what it says, and the index agrees with what it was built to find."""

from __future__ import annotations

from random import Random

from rig.index_sides import OurIndex
from rig.index_workload import ROOT_ID, Removed, SharedPrompts, Stored, trace_steps

from dynrt.planner.traces import BLOCK_TOKENS, TraceRequest

BLOCK_SIZE = 4


def trace_request(number: int, block_ids: list[int]) -> TraceRequest:
    return TraceRequest(number, float(number), len(block_ids) * BLOCK_TOKENS - 100, 1, block_ids)


def test_every_worker_holds_the_system_prompts_and_one_each_tail() -> None:
    workload = SharedPrompts(10_000, 3, BLOCK_SIZE, Random(1))
    held: list[set[int]] = [set(), set(), set()]
    for event in workload.events():
        assert event.parent in held[event.worker] | {ROOT_ID}
        assert len(event.tokens) == len(event.ids) * BLOCK_SIZE * 4
        held[event.worker].update(event.ids)
    assert len(set.union(*held)) == workload.num_blocks
    assert len(set.intersection(*held)) == 6400
    assert sum(map(len, held)) == workload.num_blocks + 2 * 6400


def test_look_ups_find_as_much_as_they_are_made_to() -> None:
    workload = SharedPrompts(10_000, 3, BLOCK_SIZE, Random(1))
    index = OurIndex(3, BLOCK_SIZE)
    index.apply(list(workload.events()))
    for matching_blocks in (256, 64, 0):
        prompts = workload.prompts(matching_blocks, 5)
        _, matches = index.look_up_packed(prompts)
        assert index.look_up(prompts)[1] == matches
        assert [max(match.values(), default=0) for match in matches] == [matching_blocks] * 5


def test_a_trace_stores_what_is_new_and_evicts_what_was_used_longest_ago() -> None:
    requests = [trace_request(number, ids) for number, ids in enumerate([[0, 1, 2], [0, 1, 3], [0, 4, 5, 6]])]
    steps = list(trace_steps(requests, num_workers=1, blocks_per_worker=3))
    stored = [[event.ids for event in step.events if isinstance(event, Stored)] for step in steps]
    removed = [[event.ids for event in step.events if isinstance(event, Removed)] for step in steps]
    assert stored == [[[1, 2]], [], [[5, 6]]], "the last block is not full"
    assert removed == [[], [], [[2]]]
    _, _, matches = OurIndex(1, BLOCK_TOKENS).serve(steps)
    assert matches == [{}, {0: 2}, {0: 1}]
