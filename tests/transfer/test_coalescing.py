"""How many layers go into one write, and what is measured for that."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dynrt.transfer.coalescing import EMPTY_WRITE_S, LinearFit, Pacing, exposed_s, layers_per_push

milliseconds = st.floats(0.001, 20)


def completed_s(
    group: int, send_s: float, layer_s: float, transfer_s: float, num_layers: int, post_s: float
) -> float:
    """Event by event: when the last byte is through, writes one after another, posts between layers."""
    through, written_at = 0.0, 0.0
    for first in range(0, num_layers, group):
        size = min(group, num_layers - first)
        written_at += size * layer_s
        through = max(through, written_at) + size * transfer_s + send_s
        written_at += post_s
    return through


@given(
    milliseconds,
    milliseconds,
    milliseconds,
    st.sampled_from([(32, g) for g in (1, 2, 4, 8, 16, 32)]),
    milliseconds,
)
def test_the_exposed_time_is_that_of_the_events(
    send_s: float, layer_s: float, transfer_s: float, shape: tuple[int, int], post_s: float
) -> None:
    num_layers, group = shape
    prefill_s = num_layers * layer_s + (num_layers // group - 1) * post_s
    exposed = completed_s(group, send_s, layer_s, transfer_s, num_layers, post_s) - prefill_s
    assert exposed_s(group, send_s, layer_s, transfer_s, num_layers, post_s) == pytest.approx(exposed)


def test_posts_cost_nothing_where_the_link_falls_behind() -> None:
    assert layers_per_push(send_s=0.01e-3, layer_s=1e-3, transfer_s=2e-3, num_layers=8, post_s=0.3e-3) == 1


@given(milliseconds, milliseconds, milliseconds, st.integers(1, 80), st.floats(0, 20), st.floats(0, 20))
def test_no_group_size_is_better(
    send_s: float, layer_s: float, transfer_s: float, num_layers: int, slack_s: float, post_s: float
) -> None:
    def cost_s(group: int) -> float:
        exposed = exposed_s(group, send_s, layer_s, transfer_s, num_layers, post_s)
        return max(0.0, exposed - slack_s) + (-(-num_layers // group) - 1) * post_s

    chosen = layers_per_push(send_s, layer_s, transfer_s, num_layers, slack_s, post_s)
    assert all(cost_s(chosen) <= cost_s(group) for group in range(1, num_layers + 1))


def test_what_still_hides_behind_the_last_layer_goes_in_fewer_writes() -> None:
    without, with_slack = (layers_per_push(1e-3, 20e-3, 1e-3, 32, slack_s, 1e-3) for slack_s in (0.0, 10e-3))
    assert without < with_slack and exposed_s(with_slack, 1e-3, 20e-3, 1e-3, 32, 1e-3) <= 10e-3


def test_a_short_prompt_goes_in_one_piece() -> None:
    assert layers_per_push(send_s=0.5e-3, layer_s=0.01e-3, transfer_s=0.001e-3, num_layers=32) == 32


@given(
    st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8), st.lists(st.integers(1, 10**7), min_size=60, max_size=90)
)
def test_fixed_cost_and_rate_are_found(empty_s: float, byte_s: float, sizes: list[int]) -> None:
    assume(max(sizes) > 2 * min(sizes))
    cost = LinearFit(EMPTY_WRITE_S)
    for _ in range(3):
        for num_bytes in sizes:
            cost.observe(num_bytes, empty_s + byte_s * num_bytes)
    fixed_s, per_byte_s = cost.estimate()
    assert fixed_s >= 0 and per_byte_s >= 0
    typical = sum(sizes) / len(sizes)
    slack_s = EMPTY_WRITE_S  # what the prior may pull
    assert fixed_s + per_byte_s * typical == pytest.approx(empty_s + byte_s * typical, rel=0.2, abs=slack_s)


def test_writes_of_one_size_still_tell_the_two_parts_apart() -> None:
    cost = LinearFit(EMPTY_WRITE_S)
    for _ in range(100):
        cost.observe(1_000_000, 0.010)
    fixed_s, per_byte_s = cost.estimate()
    assert fixed_s == pytest.approx(EMPTY_WRITE_S)
    assert per_byte_s == pytest.approx((0.010 - EMPTY_WRITE_S) / 1_000_000)


def test_unmeasured_each_layer_is_pushed_at_once() -> None:
    assert Pacing(num_layers=32).layers_per_push(num_writes=1, num_blocks=4, layer_bytes=1000) == 1


def test_fast_layers_are_pushed_together_and_slow_ones_alone() -> None:
    for gap_s, expected in ((1e-6, 32), (50e-3, 1)):
        pacing = Pacing(num_layers=32)
        pacing.step_begins(num_blocks=4, now=0.0)
        for layer in range(32):
            pacing.layer_written(layer, now=layer * gap_s)
        for number in range(50):
            pacing.write_done(1000, posted_at=float(number), done_at=number + 300e-6)
        assert pacing.layers_per_push(num_writes=1, num_blocks=4, layer_bytes=100_000) == expected


def test_a_write_that_waited_for_others_is_not_taken_for_a_slow_one() -> None:
    pacing = Pacing(num_layers=32)
    own = [pacing.write_done(1000, posted_at=0.0, done_at=done_at) for done_at in (0.25, 0.5, 0.75)]
    assert own == [0.25, 0.25, 0.25]
    assert pacing.write_done(1000, posted_at=2.0, done_at=2.5) == 0.5


@pytest.mark.parametrize(("behind_another", "expected"), [(False, 1), (True, 2)])
def test_what_it_takes_to_notice_an_end_is_no_cost_of_a_write(behind_another: bool, expected: int) -> None:
    """Layers take 1 ms, their bytes 1.2 ms; writes 0.5 ms longer than that, whatever their size."""
    pacing = Pacing(num_layers=8)
    pacing.step_begins(num_blocks=4, now=0.0)
    for layer in range(8):
        pacing.layer_written(layer, now=layer * 1e-3)
    now = 0.0
    for number in range(100):
        num_layers = 1 + number % 8
        began_at, now = now, now + num_layers * 1.2e-3 + 0.5e-3
        pacing.write_done(num_layers * 1000, posted_at=began_at - 0.1e-3 * behind_another, done_at=now)
    assert pacing.layers_per_push(num_writes=1, num_blocks=4, layer_bytes=1000) == expected


def test_a_small_step_after_large_ones_is_known_to_be_fast() -> None:
    pacing = Pacing(num_layers=32)
    for number in range(100):
        pacing.write_done(1000, posted_at=float(number), done_at=number + 300e-6)
    for num_blocks in (2, 100):  # layers of 20 and 1000 µs
        pacing.step_begins(num_blocks, now=0.0)
        for layer in range(32):
            pacing.layer_written(layer, now=layer * num_blocks * 10e-6)
    large, small = (pacing.layers_per_push(1, num_blocks, layer_bytes=1000) for num_blocks in (100, 2))
    assert large < small
