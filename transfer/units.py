"""Units of a handoff, (rank, layer, destination block), and which of them have been counted."""

from __future__ import annotations

import msgspec


class UnitRange(msgspec.Struct, frozen=True):
    """The units of one write. Blocks are indices into the reservation's block list, not block ids."""

    rank: int
    first_layer: int
    num_layers: int
    first_block: int
    num_blocks: int

    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    def blocks(self) -> range:
        return range(self.first_block, self.first_block + self.num_blocks)


class UnitSet:
    """Counts each unit once, in whatever order and however often it is reported."""

    def __init__(self, num_ranks: int, num_layers: int, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._masks = [[0] * num_layers for _ in range(num_ranks)]  # one bit per destination block
        self.missing = num_ranks * num_layers * num_blocks

    def add(self, units: UnitRange) -> None:
        """Count `units`. ValueError: they lie outside the reservation, so the peers disagree about the layout."""
        if not self._contains(units):
            raise ValueError(f"{units} lies outside {len(self._masks)} ranks of {self._num_blocks} blocks")
        written = ((1 << units.num_blocks) - 1) << units.first_block
        masks = self._masks[units.rank]
        for layer in units.layers():
            self.missing -= (written & ~masks[layer]).bit_count()
            masks[layer] |= written

    def _contains(self, units: UnitRange) -> bool:
        return (
            0 <= units.rank < len(self._masks)
            and units.first_layer + units.num_layers <= len(self._masks[units.rank])
            and units.first_block + units.num_blocks <= self._num_blocks
        )
