"""Checksums of KV in host memory: CRC-32 of what a route carries of one piece in one layer, cell after cell."""

from __future__ import annotations

import ctypes
import os
import zlib
from collections.abc import Callable, Sequence
from functools import partial

from dynrt.runtime.errors import ConfigError
from dynrt.transfer.layout import KvRegion
from dynrt.transfer.mapping import Slice
from dynrt.transfer.memory import RankMemory
from dynrt.transfer.ranks.remote import RemoteRank
from dynrt.transfer.units import UnitRange

Read = Callable[[int, int], bytes | memoryview]  # from, and up to, so many bytes behind the begin of a region


class KvChecksums:
    """Reads the KV memory of all ranks; the caller knows that nothing writes to what is read.

    Raises ConfigError for KV that this process cannot read: in device memory, or of a process it may not look into.
    """

    def __init__(self, memory: Sequence[RankMemory]) -> None:
        self._layers = [
            _remote_layers(rank) if isinstance(rank, RemoteRank) else [_own_layer(region) for region in rank]
            for rank in memory
        ]

    def of_piece(self, cells: Slice, layer: int, piece_id: int) -> int:
        read, checksum = self._layers[cells.rank][layer], 0
        for begin in cells.cells(piece_id):
            checksum = zlib.crc32(read(begin, begin + cells.cell_bytes), checksum)
        return checksum

    def of_units(self, cells: Slice, units: UnitRange, piece_ids: Sequence[int]) -> list[int]:
        """Of these pieces in each layer of `units`, layer after layer."""
        return [self.of_piece(cells, layer, piece_id) for layer in units.layers() for piece_id in piece_ids]


def _own_layer(region: KvRegion) -> Read:
    _check_device(region.device)
    view = memoryview((ctypes.c_ubyte * region.num_bytes).from_address(region.address)).cast("B")
    return lambda begin, end: view[begin:end]


def _remote_layers(rank: RemoteRank) -> list[Read]:
    _check_device(rank.device)
    layers: list[Read] = [partial(_read_process, rank.pid, address) for address in rank.region_addresses]
    try:
        layers[0](0, 1)
    except OSError as error:
        raise ConfigError(
            f"--verify-kv reads the KV of rank {rank.rank} in process {rank.pid}, which this machine refuses: {error}; "
            "leave it out"
        ) from error
    return layers


def _check_device(device: int | None) -> None:
    if device is not None:
        raise ConfigError(
            f"--verify-kv reads KV in host memory, and this engine's is on CUDA device {device}: "
            "use it with --device cpu, or leave it out"
        )


class _IoVector(ctypes.Structure):
    """The kernel's struct iovec."""

    _fields_ = [("base", ctypes.c_void_p), ("num_bytes", ctypes.c_size_t)]


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


def _read_process(pid: int, address: int, begin: int, end: int) -> memoryview:
    """Of another process's memory; of a child's, as the kernel asks who may. Raises OSError."""
    buffer = ctypes.create_string_buffer(end - begin)
    here = _IoVector(ctypes.addressof(buffer), end - begin)
    there = _IoVector(address + begin, end - begin)
    num_read = _libc.process_vm_readv(
        pid, ctypes.byref(here), ctypes.c_ulong(1), ctypes.byref(there), ctypes.c_ulong(1), ctypes.c_ulong(0)
    )
    if num_read != end - begin:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return memoryview(buffer)
