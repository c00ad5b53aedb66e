"""One push: what is to be written where."""

from __future__ import annotations

import msgspec

from dynrt.transfer.events import HandoffId
from dynrt.transfer.mapping import Route
from dynrt.transfer.units import UnitRange


class Write(msgspec.Struct, frozen=True):
    """A write to post: pieces of each of `units.num_layers` layers, on one route. Piece ids as in mapping.py."""

    id: HandoffId
    peer: str
    route: Route  # number `units.route`
    units: UnitRange
    source_pieces: list[int]
    target_pieces: list[int]

    @property
    def source_rank(self) -> int:
        """Whose agent posts it."""
        return self.route.source.rank

    @property
    def num_bytes(self) -> int:
        return self.units.num_layers * self.units.num_pieces * self.route.piece_bytes
