"""Blocks found again by the keys their worker gave them, kept as runs of consecutive keys on one path."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from dynrt.planner.edge import Blocks, Edge
from dynrt.planner.radix_tree import RadixTree


class Run:
    """Blocks with consecutive keys on one path, from depth `first` on; `live` are those not yet removed."""

    __slots__ = ("count", "edge", "first", "first_key", "live", "tree")

    def __init__(self, tree: RadixTree, first_key: int, first: int, count: int, edge: Edge) -> None:
        self.tree = tree
        self.first_key = first_key
        self.first = first
        self.count = count
        self.edge = edge  # the last live block is on this edge or above it
        self.live: Blocks = (1 << count) - 1

    @property
    def end_key(self) -> int:
        return self.first_key + self.count

    def place(self, key: int) -> tuple[Edge, int]:
        """The edge and the depth of the block with this key."""
        depth = self.first + key - self.first_key
        return _edge_at(self.edge, depth), depth

    def extend(self, count: int, edge: Edge) -> None:
        """As many more blocks follow, the last of them on `edge`."""
        self.live |= ((1 << count) - 1) << self.count
        self.count += count
        self.edge = edge

    def take(self, first_key: int, last_key: int) -> Blocks:
        """The live ones of these blocks, which are live no more."""
        low = max(first_key - self.first_key, 0)
        taken = self.live & ((1 << (last_key - self.first_key + 1)) - (1 << low))
        self.live ^= taken
        return taken

    def let_go(self) -> None:
        """Refer to no edge below the last live block."""
        self.edge = _edge_at(self.edge, self.first + self.live.bit_length() - 1)


class BlockRuns:
    """The runs of one worker, sorted by key. Engines count their blocks, so new runs go to the end."""

    __slots__ = ("_runs", "_starts")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._runs: list[Run] = []

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, index: int) -> Run:
        return self._runs[index]

    def find(self, key: int) -> Run | None:
        """The run that holds the live block with this key."""
        index = bisect_right(self._starts, key) - 1
        if index < 0:
            return None
        run = self._runs[index]
        return run if run.live >> (key - run.first_key) & 1 else None

    def within(self, first_key: int, last_key: int) -> list[Run]:
        """The runs that have keys in this range."""
        index = bisect_right(self._starts, first_key) - 1
        if index < 0 or self._runs[index].end_key <= first_key:
            index += 1
        return self._runs[index : bisect_right(self._starts, last_key)]

    def add(self, run: Run) -> None:
        index = bisect_right(self._starts, run.first_key)
        self._starts.insert(index, run.first_key)
        self._runs.insert(index, run)

    def remove(self, run: Run) -> None:
        index = bisect_right(self._starts, run.first_key) - 1
        assert self._runs[index] is run
        del self._starts[index], self._runs[index]

    def clear(self) -> None:
        self._starts.clear()
        self._runs.clear()


def ascending_runs(keys: list[int]) -> Iterator[tuple[int, int]]:
    """(first, count) of each longest stretch of consecutive ascending keys."""
    if keys and keys == list(range(keys[0], keys[0] + len(keys))):
        yield keys[0], len(keys)
        return
    first = 0
    for index in range(1, len(keys) + 1):
        if index == len(keys) or keys[index] != keys[index - 1] + 1:
            yield keys[first], index - first
            first = index


def key_ranges(keys: list[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of each longest range of keys, whatever their order."""
    return ((first, first + count - 1) for first, count in ascending_runs(sorted(set(keys))))


def _edge_at(edge: Edge, depth: int) -> Edge:
    """The edge of the block at `depth`, on the way up from `edge`."""
    while edge.start > depth:
        assert edge.parent is not None
        edge = edge.parent
    return edge
