"""The paced link: when it has carried what, and that a write is neither early nor lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynrt.transfer.throttle import LinkSpeed, PacedLink


@given(
    st.floats(1e3, 1e9),
    st.floats(0, 1),
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 1)), min_size=1, max_size=20),
)
def test_no_byte_is_faster_than_the_link_and_none_waits_for_later_ones(
    bytes_per_s: float, latency_s: float, sends: list[tuple[int, float]]
) -> None:
    link = PacedLink(LinkSpeed(bytes_per_s, latency_s))
    now = free_at = 0.0
    for num_bytes, pause_s in sends:
        now += pause_s
        free_at = max(free_at, now) + num_bytes / bytes_per_s
        assert link.carry(num_bytes, now) == pytest.approx(free_at + latency_s)


def test_a_link_without_speed_is_refused() -> None:
    with pytest.raises(AssertionError, match="is no link"):
        PacedLink(LinkSpeed(0.0))
