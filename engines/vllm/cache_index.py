"""vLLM's KV events, by its block hashes, as cache events by keys that are never used twice (sans-IO).

vLLM may hold several blocks of one content and tells of each; here a content is there while at least one block is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import msgspec

from dynrt.planner.events import ROOT, BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from dynrt.runtime.messages import pack_ids

BlockHash = Hashable


class _Content(msgspec.Struct):
    key: int
    parent_key: int
    token_ids: bytes  # packed
    salt: str
    num_blocks: int = 1  # that hold it


class CacheIndex:
    """What vLLM's prefix cache holds."""

    def __init__(self) -> None:
        self._contents: dict[BlockHash, _Content] = {}
        self._last_key = ROOT
        self._events: list[CacheEvent] = []
        self.num_blocks = 0  # that can be found, those of one content counted apiece

    def stored(
        self, hashes: Sequence[BlockHash], parent: BlockHash | None, token_ids: Sequence[int], salt: str
    ) -> None:
        """Consecutive full blocks below the one of hash `parent`; None: the first of a prompt."""
        known_parent = None if parent is None else self._contents.get(parent)
        if parent is not None and known_parent is None:
            return  # nobody could find them: look-ups come from the root
        parent_key = ROOT if known_parent is None else known_parent.key
        salt = salt if known_parent is None else known_parent.salt
        block_size = len(token_ids) // len(hashes)
        self.num_blocks += len(hashes)
        run: list[_Content] = []
        for index, block_hash in enumerate(hashes):
            content = self._contents.get(block_hash)
            if content is not None:
                content.num_blocks += 1
                self._tell_stored(run)
                run = []
            else:
                packed = pack_ids(token_ids[index * block_size : (index + 1) * block_size])
                content = self._insert(block_hash, parent_key, packed, salt)
                run.append(content)
            parent_key = content.key
        self._tell_stored(run)

    def removed(self, hashes: Sequence[BlockHash]) -> None:
        """One block of each of these contents is gone."""
        keys = [key for block_hash in hashes if (key := self._remove(block_hash)) is not None]
        if keys:
            self._events.append(BlocksRemoved(keys))

    def cleared(self) -> None:
        """All are gone."""
        self._contents.clear()
        self.num_blocks = 0
        self._events.append(CacheCleared())

    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[CacheEvent]:
        """What came since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[BlocksStored]:
        """Everything in the cache, parents before children: keys grow."""
        contents = sorted(self._contents.values(), key=lambda content: content.key)
        return [_event([content]) for content in contents]

    def _insert(self, block_hash: BlockHash, parent_key: int, packed_ids: bytes, salt: str) -> _Content:
        self._last_key += 1
        content = _Content(self._last_key, parent_key, packed_ids, salt)
        self._contents[block_hash] = content
        return content

    def _remove(self, block_hash: BlockHash) -> int | None:
        """The key of a content that left with its last block."""
        content = self._contents.get(block_hash)
        if content is None:
            return None  # it was stored below an unknown parent
        self.num_blocks -= 1
        content.num_blocks -= 1
        if content.num_blocks:
            return None
        del self._contents[block_hash]
        return content.key

    def _tell_stored(self, run: Sequence[_Content]) -> None:
        if run:
            self._events.append(_event(run))


def _event(run: Sequence[_Content]) -> BlocksStored:
    packed = b"".join(content.token_ids for content in run)
    return BlocksStored(run[0].parent_key, [content.key for content in run], packed, run[0].salt)
