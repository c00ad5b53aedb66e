"""What the prefix index takes of memory, estimated as it grows and shrinks, and the clock of its use (sans-IO)."""

from __future__ import annotations

# Bytes of CPython's objects, allocator included; a test compares the sum with what is really allocated.
TREE_BYTES = 600
EDGE_BYTES = (
    480  # beside its tokens: the object, its place among its siblings, and its first block as the key there
)
RECORD_BYTES = 160  # a holder of some of an edge's blocks
RUN_BYTES = 240
PLAN_BYTES = 480  # a run that a plan expects, with its expiry


class IndexMemory:
    """All trees and runs of one index count here."""

    __slots__ = ("_clock", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0
        self._clock = 0

    def tick(self) -> int:
        """A time later than all before."""
        self._clock += 1
        return self._clock

    def edges(self, count: int, token_bytes: int) -> None:
        """So many edges more, and so many bytes of tokens on edges."""
        self.num_bytes += count * EDGE_BYTES + token_bytes

    def records(self, count: int) -> None:
        self.num_bytes += count * RECORD_BYTES

    def trees(self, count: int) -> None:
        self.num_bytes += count * TREE_BYTES

    def runs(self, count: int) -> None:
        self.num_bytes += count * RUN_BYTES

    def plans(self, count: int) -> None:
        self.num_bytes += count * PLAN_BYTES
