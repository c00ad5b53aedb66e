"""Blocks of host memory in which every KV slot holds a word that tells which tokens it was computed from."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from dynrt.transfer.layout import KvRegion

Words = npt.NDArray[np.uint32]
Ints = npt.NDArray[np.int64]
Fingerprints = npt.NDArray[np.uint64]

_KEY_STEP = np.uint64(0x9E3779B97F4A7C15)  # odd, so all (layer, K or V) get different keys
_MIX = np.uint64(0xBF58476D1CE4E5B9)  # a multiplier of the SplitMix64 generator
_HALF = np.uint64(32)


class Slots(msgspec.Struct, frozen=True):
    """Token slots as parallel arrays: the block of each, its token's position, what the tokens up to there come to."""

    block_ids: Ints
    positions: Ints
    fingerprints: Fingerprints

    @classmethod
    def of(cls, block_ids: list[int], positions: list[int], fingerprints: list[int]) -> Slots:
        return cls(
            np.array(block_ids, np.int64),
            np.array(positions, np.int64),
            np.array(fingerprints, np.uint64),
        )


class WrongSlot(msgspec.Struct, frozen=True):
    """A slot (its index in the Slots asked about) that holds something else, and the first layer where."""

    index: int
    layer: int


class KvStore:
    """One array [num_layers, num_blocks, 2 (K, V), block_size] of 32-bit words; pages come with the first write.

    To transfers it is a KvGeometry with one head of size 1 and 4-byte values.
    """

    def __init__(self, num_layers: int, num_blocks: int, block_size: int) -> None:
        self._words: Words = np.zeros((num_layers, num_blocks, 2, block_size), np.uint32)
        keys = np.arange(1, 2 * num_layers + 1, dtype=np.uint64) * _KEY_STEP
        self._keys = keys.reshape(num_layers, 2)

    def regions(self) -> list[KvRegion]:
        return [KvRegion(layer.ctypes.data, layer.nbytes) for layer in self._words]

    def write(self, slots: Slots, first_layer: int, end_layer: int) -> None:
        """Fill these slots in layers [first_layer, end_layer)."""
        layers = slice(first_layer, end_layer)
        self._words[layers, slots.block_ids, :, self._offsets(slots)] = self._expected(slots, layers)

    def find_wrong(self, slots: Slots) -> list[WrongSlot]:
        """Those of these slots that do not hold what was to be written there."""
        every_layer = slice(None)
        found = self._words[every_layer, slots.block_ids, :, self._offsets(slots)]
        is_wrong = (found != self._expected(slots, every_layer)).any(axis=2)
        indices = np.flatnonzero(is_wrong.any(axis=1))
        return [WrongSlot(int(index), int(is_wrong[index].argmax())) for index in indices]

    def copy_blocks(
        self, source: KvStore, layer: int, source_ids: Sequence[int], target_ids: Sequence[int]
    ) -> None:
        """What a transfer of these blocks between two stores does, for simulations in one process."""
        self._words[layer, target_ids] = source._words[layer, source_ids]

    def _offsets(self, slots: Slots) -> Ints:
        return np.remainder(slots.positions, self._words.shape[-1])

    def _expected(self, slots: Slots, layers: slice) -> Words:
        """[slots, layers, 2]"""
        mixed = (slots.fingerprints[:, None, None] ^ self._keys[None, layers]) * _MIX
        return (mixed >> _HALF).astype(np.uint32)
