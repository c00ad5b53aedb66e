"""The KV cache's blocks: who holds them, and which content can be found again (sans-IO).

A block is free, active (held at least once) or cached (held by nobody, its content kept until room is needed).
The prefix cache is exact: a full block is found by its parent's key and its own token bytes, never by a hash of
them alone.

Every holder takes whole chains: with a cached block also that block's ancestors. So a parent is held at least as
often as its child, and because `release` lets go of children first, the least recently used cached block never
has a cached child. Eviction relies on that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import msgspec

from dynrt.planner.events import ROOT, BlocksRemoved, BlocksStored, CacheEvent
from dynrt.runtime.messages import pack_ids


class CachedBlock(msgspec.Struct, eq=False):
    """A full block that can be found. Keys grow, so a parent's key is smaller than its children's."""

    key: int
    block_id: int
    parent: CachedBlock | None
    salt: str
    token_bytes: bytes
    num_children: int = 0

    @property
    def parent_key(self) -> int:
        return ROOT if self.parent is None else self.parent.key


class BlockPool:
    """Reference counts and prefix cache of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0 and block_size > 0, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._holders = [0] * num_blocks
        self._free = list(reversed(range(num_blocks)))
        self._unused: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently used first
        self._by_id: dict[int, CachedBlock] = {}
        self._by_content: dict[tuple[int, str, bytes], CachedBlock] = {}
        self._last_key = ROOT
        self._events: list[CacheEvent] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds but whose content is kept."""
        return len(self._unused)

    @property
    def num_active(self) -> int:
        return self.num_blocks - self.num_free - self.num_cached

    @property
    def num_available(self) -> int:
        """How many blocks `allocate` can give."""
        return self.num_free + self.num_cached

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens, the last one perhaps partly filled."""
        return -(-num_tokens // self.block_size)

    def count_unused(self, block_ids: Sequence[int]) -> int:
        """How many of these are held by nobody: acquiring them makes that many fewer available."""
        return sum(not self._holders[block_id] for block_id in block_ids)

    def lookup(self, token_ids: Sequence[int], salt: str) -> list[int]:
        """The blocks of the longest cached prefix of `token_ids`. Acquire them before anything else happens."""
        return [cached.block_id for cached in self._walk(None, token_ids, salt)]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, each held once, evicting as needed; ascending, so that neighbours can travel together."""
        assert count <= self.num_available, (count, self.num_available)
        self._evict(count - self.num_free)
        block_ids = sorted(self._free.pop() for _ in range(count))
        for block_id in block_ids:
            self._holders[block_id] = 1
        return block_ids

    def acquire(self, block_ids: Sequence[int]) -> None:
        """Hold these once more. They are cached or active, and come with the ancestors of the cached ones."""
        for block_id in block_ids:
            assert self._holders[block_id] or block_id in self._unused, f"block {block_id} is free"
            self._unused.pop(block_id, None)
            self._holders[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Hold these once less; what nobody holds then is cached if it has content to be found, else free."""
        for block_id in sorted(block_ids, key=self._key_of, reverse=True):
            assert self._holders[block_id] > 0, f"block {block_id} is held by nobody"
            self._holders[block_id] -= 1
            if self._holders[block_id] == 0:
                self._set_unused(block_id)

    def store(
        self, block_ids: Sequence[int], token_ids: Sequence[int], parent_id: int | None, salt: str
    ) -> list[int]:
        """Make full blocks findable: consecutive ones, the first below block `parent_id`, held by the caller.

        Returns the blocks that the caller holds now. A block whose content is cached already is exchanged for the
        cached one, so that what follows has a parent to be found by.
        """
        assert len(token_ids) == len(block_ids) * self.block_size, (len(token_ids), len(block_ids))
        parent = None if parent_id is None else self._by_id[parent_id]
        known = list(self._walk(parent, token_ids, salt))
        known_ids = [cached.block_id for cached in known]
        self.acquire(known_ids)
        self.release(block_ids[: len(known)])
        new_ids = block_ids[len(known) :]
        if new_ids:
            new_tokens = token_ids[len(known) * self.block_size :]
            self._insert(new_ids, pack_ids(new_tokens), known[-1] if known else parent, salt)
        return [*known_ids, *new_ids]

    def has_events(self) -> bool:
        return bool(self._events)

    def take_events(self) -> list[CacheEvent]:
        """What was stored and removed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> list[BlocksStored]:
        """Everything that can be found, parents before children, runs of one chain together."""
        runs: list[list[CachedBlock]] = []
        for cached in sorted(self._by_id.values(), key=lambda cached: cached.key):
            if runs and cached.parent is runs[-1][-1]:
                runs[-1].append(cached)
            else:
                runs.append([cached])
        return [_stored(run) for run in runs]

    def _walk(self, parent: CachedBlock | None, token_ids: Sequence[int], salt: str) -> Iterator[CachedBlock]:
        """The cached chain below `parent` that `token_ids` spell."""
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            token_bytes = pack_ids(token_ids[start : start + self.block_size])
            parent_key = ROOT if parent is None else parent.key
            parent = self._by_content.get((parent_key, salt, token_bytes))
            if parent is None:
                return
            yield parent

    def _insert(
        self, block_ids: Sequence[int], packed_ids: bytes, parent: CachedBlock | None, salt: str
    ) -> None:
        run: list[CachedBlock] = []
        bytes_per_block = len(packed_ids) // len(block_ids)
        for index, block_id in enumerate(block_ids):
            assert self._holders[block_id] and block_id not in self._by_id, (
                f"block {block_id} cannot be stored"
            )
            token_bytes = packed_ids[index * bytes_per_block : (index + 1) * bytes_per_block]
            self._last_key += 1
            cached = CachedBlock(self._last_key, block_id, parent, salt, token_bytes)
            self._by_id[block_id] = cached
            self._by_content[cached.parent_key, salt, token_bytes] = cached
            if parent is not None:
                parent.num_children += 1
            run.append(cached)
            parent = cached
        self._events.append(_stored(run))

    def _evict(self, count: int) -> None:
        """Free the `count` least recently used cached blocks."""
        removed_keys: list[int] = []
        for _ in range(count):
            block_id, _none = self._unused.popitem(last=False)
            cached = self._by_id.pop(block_id)
            assert cached.num_children == 0, f"block {block_id} has cached children"
            del self._by_content[cached.parent_key, cached.salt, cached.token_bytes]
            if cached.parent is not None:
                cached.parent.num_children -= 1
            self._free.append(block_id)
            removed_keys.append(cached.key)
        if removed_keys:
            self._events.append(BlocksRemoved(removed_keys))

    def _set_unused(self, block_id: int) -> None:
        if block_id in self._by_id:
            self._unused[block_id] = None
        else:
            self._free.append(block_id)

    def _key_of(self, block_id: int) -> int:
        cached = self._by_id.get(block_id)
        return ROOT if cached is None else cached.key


def _stored(run: Sequence[CachedBlock]) -> BlocksStored:
    """The event that tells of one chain's consecutive blocks."""
    keys = [cached.key for cached in run]
    return BlocksStored(run[0].parent_key, keys, b"".join(cached.token_bytes for cached in run), run[0].salt)
