"""Units of a handoff, (route, layer, piece), and which of them have been counted."""

from __future__ import annotations

import msgspec


class UnitRange(msgspec.Struct, frozen=True):
    """The units of one write. `route`: its index in the pair's mapping, so that no two senders' units are alike.

    Pieces are counted from the first one of the reservation.
    """

    route: int
    first_layer: int
    num_layers: int
    first_piece: int
    num_pieces: int

    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    def pieces(self) -> range:
        return range(self.first_piece, self.first_piece + self.num_pieces)


class UnitSet:
    """Counts each unit once, in whatever order and however often it is reported."""

    def __init__(self, num_routes: int, num_layers: int, num_pieces: int) -> None:
        self._num_pieces = num_pieces
        self._masks = [[0] * num_layers for _ in range(num_routes)]  # one bit per piece
        self.missing = num_routes * num_layers * num_pieces

    def add(self, units: UnitRange) -> None:
        """Count `units`. ValueError: they lie outside the reservation, so the peers disagree about the layout."""
        if not self._contains(units):
            raise ValueError(f"{units} lies outside {len(self._masks)} routes of {self._num_pieces} pieces")
        written = ((1 << units.num_pieces) - 1) << units.first_piece
        masks = self._masks[units.route]
        for layer in units.layers():
            self.missing -= (written & ~masks[layer]).bit_count()
            masks[layer] |= written

    def _contains(self, units: UnitRange) -> bool:
        return (
            0 <= units.route < len(self._masks)
            and units.first_layer + units.num_layers <= len(self._masks[units.route])
            and units.first_piece + units.num_pieces <= self._num_pieces
        )
