"""The restart policy: a limit within a window, pauses that double up to a longest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynrt.runtime.restart import RestartPolicy

gaps_s = st.lists(st.floats(0.0, 100.0), min_size=1, max_size=40)


def test_pauses_double_and_the_limit_gives_up() -> None:
    policy = RestartPolicy(limit=5, window_s=60.0, first_pause_s=0.1, longest_pause_s=1.0)
    pauses = [policy.crashed(now) for now in range(6)]
    assert pauses == [*(pytest.approx(pause) for pause in (0.1, 0.2, 0.4, 0.8, 1.0)), None]


def test_crashes_outside_the_window_are_forgotten() -> None:
    policy = RestartPolicy(limit=1, window_s=60.0)
    assert policy.crashed(0.0) is not None
    assert policy.crashed(60.0) == pytest.approx(0.1)
    assert policy.crashed(119.0) is None


@given(gaps_s, st.integers(1, 6), st.floats(1.0, 200.0))
def test_gives_up_exactly_when_the_window_holds_more_than_the_limit(
    gaps_s: list[float], limit: int, window_s: float
) -> None:
    policy = RestartPolicy(limit, window_s)
    now, crashes = 0.0, []
    for gap_s in gaps_s:
        now += gap_s
        crashes.append(now)
        num_recent = sum(crash > now - window_s for crash in crashes)
        pause_s = policy.crashed(now)
        assert (pause_s is None) == (num_recent > limit)
        if pause_s is not None:
            assert pause_s == pytest.approx(min(10.0, 0.1 * 2 ** (num_recent - 1)))
