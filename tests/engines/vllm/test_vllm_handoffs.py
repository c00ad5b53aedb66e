"""What is announced of a prompt and what is reserved for one, without vLLM."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynrt.engines.protocol import Reservation
from dynrt.engines.vllm.handoffs import Handoffs

BLOCK_SIZE = 32
ID = (b"key", 0)


@st.composite
def computations(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """A prompt's length, and the spans computed of it; each attempt but the last is cut short by a preemption."""
    num_tokens = draw(st.integers(1, 200))
    spans: list[tuple[int, int]] = []
    for attempt in reversed(range(draw(st.integers(1, 3)))):
        start = draw(st.integers(0, (num_tokens - 1) // BLOCK_SIZE)) * BLOCK_SIZE  # a prefix hit
        while start < num_tokens:
            end = draw(st.integers(start + 1, num_tokens))
            if attempt and end == num_tokens:
                break
            spans.append((start, end))
            start = end
    return num_tokens, spans


@given(computations())
def test_each_block_is_announced_once_and_when_it_is_complete(
    computation: tuple[int, list[tuple[int, int]]],
) -> None:
    num_tokens, spans = computation
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    handoffs = Handoffs(BLOCK_SIZE)
    handoffs.open_prefill("a", ID, num_tokens)
    announced: list[int] = []
    for step, (start, end) in enumerate(spans):
        table = [100 * step + block for block in range(num_blocks)]  # another one in each step
        growing = set(handoffs.touched(start, end, table))
        for blocks in handoffs.announce("a", start, end, table, growing):
            assert (blocks.key, blocks.epoch, blocks.num_prompt_tokens) == (*ID, num_tokens)
            assert blocks.first_block == len(announced) and blocks.block_ids
            announced += blocks.block_ids
            last_token = min(len(announced) * BLOCK_SIZE, num_tokens)
            assert last_token <= (start if blocks.written else end)
            assert blocks.block_ids == table[blocks.first_block : len(announced)]
    assert len(announced) == num_blocks
    assert handoffs.has_pins(ID)
    assert handoffs.close_prefill(ID) == announced
    assert handoffs.close_prefill(ID) == [] and not handoffs.has_pins(ID)


def test_prefix_hit_that_another_request_computes_in_the_same_step() -> None:
    handoffs = Handoffs(BLOCK_SIZE)
    handoffs.open_prefill("a", ID, 130)
    growing = {8, 9, *handoffs.touched(96, 130, [6, 7, 8, 4, 5])}
    assert growing == {8, 9, 4, 5}
    announced = handoffs.announce("a", 96, 130, [6, 7, 8, 4, 5], growing)
    assert [(b.block_ids, b.written) for b in announced] == [([6, 7], True), ([8, 4, 5], False)]


def test_nothing_is_announced_after_release() -> None:
    handoffs = Handoffs(BLOCK_SIZE)
    assert not handoffs.is_prefilling
    handoffs.open_prefill("a", ID, 96)
    assert handoffs.is_prefilling
    assert [blocks.block_ids for blocks in handoffs.announce("a", 0, 70, [7, 8, 9], {7, 8, 9})] == [[7, 8]]
    assert handoffs.close_prefill(ID) == [7, 8]
    assert handoffs.announce("a", 70, 96, [7, 8, 9], {9}) == []


def test_requests_without_handoff_are_not_announced() -> None:
    assert Handoffs(BLOCK_SIZE).announce("a", 0, 64, [1, 2], {1, 2}) == []


@given(num_tokens=st.integers(1, 200), data=st.data())
def test_reservation_is_what_lies_behind_the_prefix_hit(num_tokens: int, data: st.DataObject) -> None:
    handoffs = Handoffs(BLOCK_SIZE)
    handoffs.open_receive("a", num_tokens)
    hit = data.draw(st.integers(0, (num_tokens - 1) // BLOCK_SIZE))
    num_to_load = handoffs.tokens_to_load("a", hit * BLOCK_SIZE)
    assert num_to_load == num_tokens - hit * BLOCK_SIZE
    assert handoffs.take_reservation("a") is None and not handoffs.is_reserved("a")
    table = list(range(10, 10 + -(-num_tokens // BLOCK_SIZE) + data.draw(st.integers(0, 1))))
    handoffs.allocated("a", table, num_to_load)
    assert handoffs.has_untaken and handoffs.num_reserved == 1
    assert handoffs.take_reservation("a") == Reservation(hit, table[hit : -(-num_tokens // BLOCK_SIZE)])
    assert handoffs.is_reserved("a") and not handoffs.has_untaken
    assert handoffs.close_receive("a")
    assert handoffs.tokens_to_load("a", 0) == 0, "preempted later, it computes here"
    assert not handoffs.is_reserved("a") and handoffs.num_receiving == 0


def test_what_was_never_allocated_holds_no_blocks() -> None:
    handoffs = Handoffs(BLOCK_SIZE)
    handoffs.open_receive("a", 50)
    assert handoffs.num_receiving == 1 and handoffs.num_reserved == 0
    assert not handoffs.close_receive("a")
    assert not handoffs.close_receive("b"), "no receive at all"
