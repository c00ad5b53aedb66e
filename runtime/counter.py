"""A counter that is cheap to count with, exported to Prometheus; prometheus_client's own locks for each count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector


class Count:
    """One number that only grows."""

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        assert amount >= 0, amount
        self.value += amount


class Counter(Collector):
    """Counts by the values of its labels; for one thread."""

    def __init__(
        self, name: str, text: str, label_names: Sequence[str] = (), *, registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._text = text
        self._label_names = tuple(label_names)
        self._counts: dict[tuple[str, ...], Count] = {}
        if not label_names:
            self.labels()  # is there before it counts anything
        registry.register(self)

    def labels(self, *values: str) -> Count:
        """The count under these values of the labels, from zero at first use."""
        count = self._counts.get(values)
        if count is None:
            assert len(values) == len(self._label_names), (self._name, values)
            count = self._counts[values] = Count()
        return count

    def inc(self, amount: float = 1.0) -> None:
        """Of a counter without labels."""
        self.labels().inc(amount)

    def collect(self) -> Iterator[CounterMetricFamily]:
        family = CounterMetricFamily(self._name, self._text, labels=self._label_names)
        for values, count in self._counts.items():
            family.add_metric(values, count.value)
        yield family
