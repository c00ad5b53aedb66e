"""Numbers of a replay, and the table of them."""

from __future__ import annotations

import msgspec
import pytest
from small_traces import ask

from dynrt.runtime.replay.replay import Replayed, Served, WorkerUse
from dynrt.runtime.replay.summary import Limits, Percentiles, summarize
from dynrt.runtime.replay.table import table

LIMITS = Limits(ttft_s=1.0, itl_s=0.1)
SERVED = [
    Served(ask(0, 0.0, 100, 11), cached_tokens=60, first_at=0.5, finished_at=1.5),  # 0.5 s, 0.1 s
    Served(ask(1, 1.0, 100, 11), cached_tokens=0, first_at=2.5, finished_at=3.0),  # 1.5 s: too late
    Served(ask(2, 2.0, 200, 11), cached_tokens=40, first_at=2.5, finished_at=5.0),  # 0.25 s: too slow
    Served(ask(3, 3.0, 100, 1), cached_tokens=0, first_at=4.0, finished_at=4.0),  # one token has no gaps
    Served(ask(4, 4.0, 100, 9), error="no room"),
]
WORKERS = [
    WorkerUse("prefill-0", 2.0, {0: 300, 1: 100}),
    WorkerUse("prefill-1", 1.0, {0: 100, 1: 100, 2: 0}),
]


def test_numbers_by_hand() -> None:
    summary = summarize(Replayed("planner", SERVED, WORKERS), LIMITS)
    assert (summary.requests, summary.failed, summary.first_error) == (5, 1, "no room")
    assert summary.duration_s == 5.0
    assert summary.hit_share == pytest.approx(100 / 500)
    assert summary.ttft_s == Percentiles(p50=1.0, p90=1.5, p99=1.5)
    assert (summary.itl_s.p50, summary.itl_s.p99) == (pytest.approx(0.1), pytest.approx(0.25))
    assert (summary.goodput_per_s, summary.good_share) == (pytest.approx(2 / 5), pytest.approx(2 / 5))
    assert summary.imbalance == pytest.approx((1.5 + 1.0) / 2), "a minute without work does not count"
    assert summary.busy_share == pytest.approx(3 / 10)


def test_nothing_served_is_all_zeros() -> None:
    summary = summarize(Replayed("planner", SERVED[-1:], WORKERS), LIMITS)
    assert (summary.failed, summary.goodput_per_s, summary.hit_share) == (1, 0.0, 0.0)
    assert summary.ttft_s == Percentiles(0.0, 0.0, 0.0)


def test_percentiles_are_values_that_were_seen() -> None:
    assert Percentiles.of([float(value) for value in range(101)]) == Percentiles(50.0, 90.0, 99.0)
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 3.0)


def test_table_has_aligned_columns() -> None:
    ours = summarize(Replayed("planner", SERVED, WORKERS), LIMITS)
    other = msgspec.structs.replace(ours, policy="kv-formula-16", goodput_per_s=12345.678)
    lines = table([ours, other]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[1].split() == [
        *("planner", "20.0", "1.00", "1.50", "1.50", "100.0", "250.0", "250.0"),
        *("0.40", "40.0", "1.25", "30", "1"),
    ]
    assert lines[2].split()[8] == "12345.68"
