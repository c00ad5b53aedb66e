"""Checksums of KV in host memory: CRC-32 of what a route carries of one piece in one layer, cell after cell."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence

from dynrt.runtime.errors import ConfigError
from dynrt.transfer.layout import KvRegion
from dynrt.transfer.mapping import Slice
from dynrt.transfer.units import UnitRange


class KvChecksums:
    """Reads the KV memory of all ranks; the caller knows that nothing writes to what is read.

    Raises ConfigError for KV in device memory.
    """

    def __init__(self, regions: Sequence[Sequence[KvRegion]]) -> None:
        self._layers = [[_view(region) for region in rank] for rank in regions]

    def of_piece(self, cells: Slice, layer: int, piece_id: int) -> int:
        region, checksum = self._layers[cells.rank][layer], 0
        for begin in cells.cells(piece_id):
            checksum = zlib.crc32(region[begin : begin + cells.cell_bytes], checksum)
        return checksum

    def of_units(self, cells: Slice, units: UnitRange, piece_ids: Sequence[int]) -> list[int]:
        """Of these pieces in each layer of `units`, layer after layer."""
        return [self.of_piece(cells, layer, piece_id) for layer in units.layers() for piece_id in piece_ids]


def _view(region: KvRegion) -> memoryview:
    if region.device is not None:
        raise ConfigError(
            f"--verify-kv reads KV in host memory, and this engine's is on CUDA device {region.device}: "
            "use it with --device cpu, or leave it out"
        )
    return memoryview((ctypes.c_ubyte * region.num_bytes).from_address(region.address)).cast("B")
