"""A histogram that is cheap to fill, exported to Prometheus under as many names as it has readers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector


class Tally:
    """Counts values by bucket; `bounds` are the buckets' largest values, ascending."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), bounds
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self._counts)

    def observe(self, value: float, count: int = 1) -> None:
        """Note `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.sum += value * count

    def observe_between(self, begin: float | None, end: float | None, parts: int = 1) -> None:
        """Note how long each of equal parts took, if there are any and both moments are known; at least 0."""
        if begin is None or end is None or parts < 1:
            return
        value = (end - begin) / parts if end > begin else 0.0
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """As Prometheus has them: each bound with the count of all values up to it."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class TallyExport(Collector):
    """One name of a tally."""

    def __init__(self, name: str, text: str, tally: Tally, labels: Mapping[str, str]) -> None:
        self._name = name
        self._text = text
        self._tally = tally
        self._labels = labels

    def collect(self) -> Iterator[HistogramMetricFamily]:
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), self._tally.buckets(), self._tally.sum)
        yield family
