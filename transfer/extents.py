"""What of a prompt is written, and what of it was posted to its target: bookkeeping of the prefill end (sans-IO)."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from dynrt.transfer.events import Arm
from dynrt.transfer.mapping import KvMapping, pieces_of
from dynrt.transfer.units import UnitRange
from dynrt.transfer.write import Write


class Target(msgspec.Struct, frozen=True):
    """Where a handoff's pieces go. Pieces are counted from the prompt's first; decode holds the first ones already."""

    arm: Arm
    mapping: KvMapping
    first_piece: int
    end_piece: int
    piece_ids: list[int]

    @classmethod
    def of(cls, arm: Arm, mapping: KvMapping) -> Target:
        per_block = mapping.target_pieces_per_block
        piece_ids = pieces_of(arm.block_ids, per_block)
        return cls(arm, mapping, arm.first_block * per_block, mapping.num_pieces(arm.num_tokens), piece_ids)


@dataclass
class Extent:
    """Blocks announced together: they lie in every layer up to `layers_written`."""

    first_block: int  # of the prompt
    block_ids: list[int]
    num_layers: int
    layers_written: int
    layers_per_push: int = 1
    first_piece: int = 0  # of the prompt; this and the next two once there is a target
    piece_ids: list[int] = field(default_factory=list)
    layers_posted: list[int] = field(default_factory=list)  # by route

    def aim(self, target: Target) -> None:
        """See which pieces of it the target wants."""
        per_block = target.mapping.source_pieces_per_block
        begin = self.first_block * per_block
        end = min(begin + len(self.block_ids) * per_block, target.end_piece)
        self.first_piece = max(begin, target.first_piece)
        self.piece_ids = pieces_of(self.block_ids, per_block)[self.first_piece - begin : max(0, end - begin)]
        self.layers_posted = [0] * len(target.mapping.routes)

    @property
    def is_over(self) -> bool:
        """Written in full, and posted in full as far as the target wants it."""
        is_posted = not self.piece_ids or min(self.layers_posted) == self.num_layers
        return is_posted and self.layers_written == self.num_layers

    def next_write(self, target: Target, max_bytes: int) -> Write | None:
        """The next layers that may be posted, on the first route that has some."""
        for route in range(len(target.mapping.routes)):
            num_layers = self._layers_due(target, route, max_bytes)
            if num_layers > 0:
                return self._take(target, route, num_layers)
        return None

    def _layers_due(self, target: Target, route: int, max_bytes: int) -> int:
        pending = self.layers_written - self.layers_posted[route]
        waits = pending < self.layers_per_push and self.layers_written < self.num_layers
        if waits or not self.piece_ids:
            return 0
        layer_bytes = len(self.piece_ids) * target.mapping.routes[route].piece_bytes
        return min(pending, max(1, max_bytes // layer_bytes))

    def _take(self, target: Target, route: int, num_layers: int) -> Write:
        num_pieces, first_piece = len(self.piece_ids), self.first_piece - target.first_piece
        units = UnitRange(route, self.layers_posted[route], num_layers, first_piece, num_pieces)
        self.layers_posted[route] += num_layers
        return Write(
            id=target.arm.id,
            peer=target.arm.peer,
            route=target.mapping.routes[route],
            units=units,
            source_pieces=self.piece_ids,
            target_pieces=target.piece_ids[first_piece : first_piece + num_pieces],
        )
