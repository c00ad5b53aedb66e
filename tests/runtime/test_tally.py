"""Tallies against Prometheus' own histogram, and one tally under two names."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dynrt.runtime.tally import Tally, TallyExport

BOUNDS = (0.001, 0.5, 1.0, 80.0)


def samples(registry: CollectorRegistry) -> dict[tuple[str, str | None], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, sample.labels.get("le")): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


values = st.sampled_from([*BOUNDS, 0.0, 0.0005, 0.3, 0.75, 2.0, 79.0, 100.0])


@settings(max_examples=50)
@given(st.lists(st.tuples(values, st.integers(1, 5))))
def test_it_counts_as_a_histogram_of_prometheus_does(observed: list[tuple[float, int]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally(BOUNDS)
    ours.register(TallyExport("latency_seconds", "text", tally, {}))
    histogram = Histogram("latency_seconds", "text", buckets=BOUNDS, registry=theirs)
    for value, count in observed:
        tally.observe(value, count)
        for _ in range(count):
            histogram.observe(value)
    shown, expected = samples(ours), samples(theirs)
    assert shown.keys() == expected.keys()
    assert all(abs(shown[key] - expected[key]) < 1e-6 * (1 + expected[key]) for key in shown)


def test_one_tally_has_many_names() -> None:
    registry, tally = CollectorRegistry(), Tally(BOUNDS)
    registry.register(TallyExport("dynrt_x_seconds", "text", tally, {}))
    registry.register(TallyExport("vllm:y_seconds", "text", tally, {"engine": "0"}))
    tally.observe(0.7, 3)
    shown = samples(registry)
    assert shown["dynrt_x_seconds_bucket", "1.0"] == shown["vllm:y_seconds_bucket", "1.0"] == 3.0
    assert shown["vllm:y_seconds_count", None] == tally.count == 3


def test_time_between_two_moments_is_told_if_both_are_known() -> None:
    tally = Tally(BOUNDS)
    for begin, end, parts in ((None, 1.0, 1), (1.0, None, 1), (1.0, 2.0, 0)):
        tally.observe_between(begin, end, parts)
    assert tally.count == 0
    tally.observe_between(1.0, 4.0, 2)
    tally.observe_between(4.0, 3.0)
    assert (tally.count, tally.sum) == (2, 1.5), "clocks that differ make nothing negative"
