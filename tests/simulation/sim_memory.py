"""The KV memory of a simulated engine: who owns each block, and which tokens its content stands for."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

from dynrt.runtime.messages import pack_ids
from dynrt.transfer.events import HandoffId
from dynrt.transfer.layout import KvGeometry

NUM_LAYERS = 3
BLOCK_SIZE = 16
NUM_BLOCKS = 64
VOCAB_SIZE = 512
GEOMETRY = KvGeometry(NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads=1, head_size=4, dtype="float32")


def num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_SIZE)


def block_content(token_ids: Sequence[int], block: int, layer: int) -> int:
    """What KV must stand in a prompt's block: it depends on all tokens up to the block's end."""
    return crc32(pack_ids(token_ids[: (block + 1) * BLOCK_SIZE]), layer)


class SimMemory:
    """Blocks are taken and given back by owner; every write and read checks the owner."""

    def __init__(self) -> None:
        self._free = list(range(NUM_BLOCKS))
        self._owners: dict[int, HandoffId] = {}
        self._content: dict[tuple[int, int], int] = {}
        self.violations: list[str] = []

    @property
    def num_active(self) -> int:
        return len(self._owners)

    def take(self, count: int, owner: HandoffId) -> list[int] | None:
        if len(self._free) < count:
            return None
        block_ids = [self._free.pop(0) for _ in range(count)]
        self._owners.update(dict.fromkeys(block_ids, owner))
        return block_ids

    def give(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            del self._owners[block_id]
        self._free.extend(block_ids)

    def write(self, owner: HandoffId, block_id: int, layer: int, content: int) -> None:
        if self._owners.get(block_id) != owner:
            self.violations.append(f"{owner} wrote to block {block_id} of {self._owners.get(block_id)}")
        self._content[block_id, layer] = content

    def read(self, owner: HandoffId, block_id: int, layer: int) -> int | None:
        if self._owners.get(block_id) != owner:
            self.violations.append(f"{owner} read from block {block_id} of {self._owners.get(block_id)}")
        return self._content.get((block_id, layer))

    def check(self, owner: HandoffId, block_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """The prompt's KV is there, in every layer."""
        for block in range(num_blocks(len(token_ids))):
            for layer in range(NUM_LAYERS):
                expected = block_content(token_ids, block, layer)
                if self.read(owner, block_ids[block], layer) != expected:
                    self.violations.append(f"{owner}: block {block} of layer {layer} is not the prompt's")
