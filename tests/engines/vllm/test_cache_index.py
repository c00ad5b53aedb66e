"""vLLM's KV events as cache events: whatever it does, who follows them knows what is in the cache."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynrt.engines.vllm.cache_index import CacheIndex
from dynrt.planner.events import ROOT, BlocksRemoved, BlocksStored, CacheCleared
from dynrt.runtime.messages import pack_ids

BLOCK_SIZE = 2
Chain = tuple[int, ...]  # one token stands for a block of two


class Follower:
    """Knows the cache from events alone: content of each key, as the chain from the root, with its salt."""

    def __init__(self) -> None:
        self.chains: dict[int, tuple[str, tuple[bytes, ...]]] = {}
        self.keys_seen: set[int] = set()

    def follow(self, stored: BlocksStored) -> None:
        parent = ("", ()) if stored.parent_key == ROOT else self.chains[stored.parent_key]
        salt, chain = stored.salt, parent[1]
        assert stored.parent_key == ROOT or salt == parent[0]
        size = len(stored.token_ids) // len(stored.keys)
        for index, key in enumerate(stored.keys):
            assert key not in self.keys_seen
            chain = (*chain, stored.token_ids[index * size : (index + 1) * size])
            self.chains[key] = salt, chain
            self.keys_seen.add(key)


class CacheIndexMachine(RuleBasedStateMachine):
    """Plays vLLM's block pool: prompts of a few tokens, stored below what they share, several blocks per content."""

    def __init__(self) -> None:
        super().__init__()
        self.index = CacheIndex()
        self.follower = Follower()
        self.blocks: Counter[tuple[str, Chain]] = Counter()

    @rule(
        tokens=st.lists(st.integers(0, 2), min_size=1, max_size=4),
        salt=st.sampled_from(["", "tenant"]),
        hit=st.integers(0, 3),
    )
    def store(self, tokens: list[int], salt: str, hit: int) -> None:
        """A prompt whose first blocks were a hit. Computed twice at once, a content gets a second block."""
        chains = [tuple(tokens[: end + 1]) for end in range(len(tokens))]
        hit = min(hit, len(tokens) - 1)
        if any(not self.blocks[salt, chain] for chain in chains[:hit]):
            return
        parent = _hash(salt, chains[hit - 1]) if hit else None
        new = chains[hit:]
        token_ids = [token for chain in new for token in (chain[-1], 9)]
        self.index.stored([_hash(salt, chain) for chain in new], parent, token_ids, salt if not hit else "")
        self.blocks.update((salt, chain) for chain in new)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        """vLLM evicts children before their parents."""
        held = sorted(content for content, count in self.blocks.items() if count)
        leaves = [
            one for one in held if self.blocks[one] > 1 or not any(_is_below(other, one) for other in held)
        ]
        if leaves:
            gone = data.draw(st.sampled_from(leaves))
            self.index.removed([_hash(*gone)])
            self.blocks[gone] -= 1

    @rule()
    def clear(self) -> None:
        self.index.cleared()
        self.blocks.clear()

    @invariant()
    def follower_knows_the_cache(self) -> None:
        for event in self.index.take_events():
            match event:
                case BlocksStored():
                    self.follower.follow(event)
                case BlocksRemoved(keys):
                    for key in keys:
                        del self.follower.chains[key]
                case CacheCleared():
                    self.follower.chains.clear()
        assert not self.index.has_events()
        assert set(self.follower.chains.values()) == self._contents()
        assert self.index.num_blocks == self.blocks.total()

    @invariant()
    def snapshot_tells_the_same(self) -> None:
        fresh = Follower()
        for stored in self.index.snapshot():
            fresh.follow(stored)
        assert set(fresh.chains.values()) == self._contents()

    def _contents(self) -> set[tuple[str, tuple[bytes, ...]]]:
        held = [content for content, count in self.blocks.items() if count]
        return {(salt, tuple(pack_ids([token, 9]) for token in chain)) for salt, chain in held}


def _hash(salt: str, chain: Chain) -> bytes:
    return repr((salt, chain)).encode()


def _is_below(other: tuple[str, Chain], one: tuple[str, Chain]) -> bool:
    return other != one and other[0] == one[0] and other[1][: len(one[1])] == one[1]


TestCacheIndex = CacheIndexMachine.TestCase


def test_blocks_below_an_unknown_parent_are_not_told() -> None:
    index = CacheIndex()
    index.stored([b"child"], b"parent", [1, 9], "")
    index.removed([b"child"])
    assert not index.has_events() and index.num_blocks == 0
