"""Checksums of KV blocks in host memory: CRC-32 of one layer's block, K and V together."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence

from dynrt.runtime.errors import ConfigError
from dynrt.transfer.layout import KvGeometry, KvRegion
from dynrt.transfer.units import UnitRange


class BlockChecksums:
    """Reads the KV memory of all ranks; the caller knows that nothing writes to what is read.

    Raises ConfigError for KV in device memory.
    """

    def __init__(self, geometry: Sequence[KvGeometry], regions: Sequence[Sequence[KvRegion]]) -> None:
        self._block_bytes = [rank.layer_block_bytes for rank in geometry]
        self._layers = [[_view(region) for region in rank] for rank in regions]

    def of_block(self, rank: int, layer: int, block_id: int) -> int:
        size = self._block_bytes[rank]
        return zlib.crc32(self._layers[rank][layer][block_id * size : (block_id + 1) * size])

    def of_units(self, units: UnitRange, block_ids: Sequence[int]) -> list[int]:
        """Of blocks `block_ids` in each layer of `units`, layer after layer."""
        return [
            self.of_block(units.rank, layer, block_id) for layer in units.layers() for block_id in block_ids
        ]


def _view(region: KvRegion) -> memoryview:
    if region.device is not None:
        raise ConfigError(
            f"--verify-kv reads KV in host memory, and this engine's is on CUDA device {region.device}: "
            "use it with --device cpu, or leave it out"
        )
    return memoryview((ctypes.c_ubyte * region.num_bytes).from_address(region.address)).cast("B")
