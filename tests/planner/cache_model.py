"""What the prefix index is measured against: a worker's cache as a dict, and its hits by the definition."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

from dynrt.planner.events import (
    ROOT,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    CacheEvents,
    CacheSnapshot,
)
from dynrt.runtime.messages import pack_ids

Path = tuple[int, ...]  # the tokens of a block and of all blocks before it
Held = frozenset[tuple[str, Path]]  # (salt, path of a block)


@dataclass
class CacheModel:
    """An engine's prefix cache: `blocks` by key, and what was held before each numbered event."""

    block_size: int
    blocks: dict[int, tuple[str, Path]] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    history: list[Held] = field(default_factory=lambda: [frozenset()])
    last_key: int = ROOT

    @property
    def next_seq(self) -> int:
        return len(self.history) - 1

    def run(self, *events: CacheEvent) -> CacheEvents:
        """Number events that were just made."""
        return CacheEvents(self.next_seq - len(events), list(events))

    def store(
        self, parent_key: int, token_ids: list[int], salt: str = "", skip_keys: int = 0
    ) -> BlocksStored:
        if parent_key != ROOT:
            salt = self.blocks[parent_key][0]
        path = self.blocks[parent_key][1] if parent_key != ROOT else ()
        keys, above = [], parent_key
        for start in range(0, len(token_ids), self.block_size):
            self.last_key += 1 + skip_keys
            path = (*path, *token_ids[start : start + self.block_size])
            self.blocks[self.last_key] = (salt, path)
            self.parents[self.last_key] = above
            above = self.last_key
            keys.append(self.last_key)
        self._remember()
        return BlocksStored(parent_key, keys, pack_ids(token_ids), salt)

    def remove(self, keys: list[int]) -> BlocksRemoved:
        for key in keys:
            self.blocks.pop(key, None)
        self._remember()
        return BlocksRemoved(keys)

    def clear(self) -> CacheCleared:
        self.blocks.clear()
        self._remember()
        return CacheCleared()

    def leaves_first(self) -> list[int]:
        """The keys in an order in which they may be removed one by one."""
        return sorted(self.blocks, reverse=True)

    def has_holes(self) -> bool:
        """Whether a block is held without its parent: such a cache cannot be told by a snapshot."""
        return any(self.parents[key] not in {ROOT, *self.blocks} for key in self.blocks)

    def snapshot(self) -> CacheSnapshot:
        stored = []
        for key in sorted(self.blocks):
            salt, path = self.blocks[key]
            stored.append(BlocksStored(self.parents[key], [key], pack_ids(path[-self.block_size :]), salt))
        return CacheSnapshot(self.next_seq, stored)

    def _remember(self) -> None:
        self.history.append(frozenset(self.blocks.values()))


def hit_tokens(held: Held, salt: str, prompt: Path, block_size: int) -> int:
    """Tokens of the longest prefix of which every block is held."""
    hit = 0
    while hit + block_size <= len(prompt) and (salt, prompt[: hit + block_size]) in held:
        hit += block_size
    return hit


def all_blocks(salt: str, prompt: Path, block_size: int) -> Held:
    ends = range(block_size, len(prompt) + 1, block_size)
    return frozenset((salt, prompt[:end]) for end in ends)


def outcome(steps: Generator[None, None, bool]) -> bool:
    """What a restoration returns when all its steps are done."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bool(end.value)
