"""What the prefix index takes of memory, estimated as it grows and shrinks, and the clock of its use (sans-IO).

The sizes are those of CPython's objects; a test compares the sum with what is really allocated.
"""

from __future__ import annotations

from dynrt.planner.edge import Edge

TREE_BYTES = 300
EDGE_BYTES = 210  # beside its tokens: the object, and its place among its siblings
KEY_BYTES = 33  # its first block once more, as the key there; an edge of one block is that key
CHILDREN_BYTES = 190
RECORD_BYTES = 120  # a holder of some of an edge's blocks
RUN_BYTES = 135
PLAN_BYTES = 280  # a run that a plan expects, with its expiry


class IndexMemory:
    """All trees and runs of one index count here."""

    __slots__ = ("clock", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.clock = 0  # counted up by each look-up and each insertion, which are later than all before


def edge_bytes(edge: Edge, block_bytes: int) -> int:
    """What an edge takes, without the dict of its children."""
    num_bytes = EDGE_BYTES + len(edge.tokens) + RECORD_BYTES * edge.num_records
    if edge.length > 1:
        num_bytes += KEY_BYTES + block_bytes
    return num_bytes
