"""The counter: what Prometheus reads of it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from dynrt.runtime.counter import Counter


def exposed(registry: CollectorRegistry) -> list[str]:
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_a_counter_without_labels_is_there_from_the_start() -> None:
    registry = CollectorRegistry()
    counter = Counter("things", "Things", registry=registry)
    assert exposed(registry) == ["things_total 0.0"]
    counter.inc()
    counter.inc(2)
    assert exposed(registry) == ["things_total 3.0"]


def test_counts_by_labels_appear_once_they_are_named() -> None:
    registry = CollectorRegistry()
    counter = Counter("answers", "Answers", ["route", "status"], registry=registry)
    assert exposed(registry) == []
    counter.labels("/a", "200").inc(5)
    counter.labels("/a", "404")
    counter.labels("/a", "200").inc()
    assert exposed(registry) == [
        'answers_total{route="/a",status="200"} 6.0',
        'answers_total{route="/a",status="404"} 0.0',
    ]
