"""What prefix indexes are measured with: system prompts with private tails, and a trace against bounded caches.

Block ids name a path: two blocks have the same id if they and all blocks before them have the same tokens.
"""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from dynrt.planner.traces import BLOCK_TOKENS, TraceRequest

ROOT_ID = 0
ROUTE_CHANGES_EVERY = 64  # requests, after which a first block may be served elsewhere


class Stored(NamedTuple):
    """`worker` holds these blocks, consecutive and below block `parent`; `tokens` are theirs, packed as uint32."""

    worker: int
    parent: int
    ids: list[int]
    tokens: bytes


class Removed(NamedTuple):
    worker: int
    ids: list[int]


Event = Stored | Removed


class Step(NamedTuple):
    """One request of a trace: it is looked up, and then its worker's cache changes."""

    prompt: bytes
    events: list[Event]


class SharedPrompts:
    """System prompts that every worker holds, and tails behind them that one worker holds each."""

    ROOTS, ROOT_BLOCKS, TAIL_BLOCKS, BLOCKS_AN_EVENT = 100, 64, 192, 16

    def __init__(self, num_blocks: int, num_workers: int, block_size: int, random: Random) -> None:
        self.num_workers = num_workers
        self.block_size = block_size
        self._random = random
        self._ids = itertools.count(1)
        self._roots = [self._new_path(self.ROOT_BLOCKS) for _ in range(self.ROOTS)]
        num_tails = (num_blocks - self.ROOTS * self.ROOT_BLOCKS) // self.TAIL_BLOCKS
        self._tails = [
            (random.randrange(self.ROOTS), random.randrange(num_workers), *self._new_path(self.TAIL_BLOCKS))
            for _ in range(num_tails)
        ]

    @property
    def num_blocks(self) -> int:
        """Distinct ones."""
        return self.ROOTS * self.ROOT_BLOCKS + len(self._tails) * self.TAIL_BLOCKS

    def events(self) -> Iterator[Stored]:
        for ids, tokens in self._roots:
            for worker in range(self.num_workers):
                yield from self._stored(worker, ROOT_ID, ids, tokens)
        for root, worker, ids, tokens in self._tails:
            yield from self._stored(worker, self._roots[root][0][-1], ids, tokens)

    def prompts(self, matching_blocks: int, count: int) -> list[bytes]:
        """Prompts of 256 blocks: known to their end, as far as the system prompt, or not at all."""
        length = (self.ROOT_BLOCKS + self.TAIL_BLOCKS) * self.block_size * 4
        prompts = []
        for _ in range(count):
            root, _, _, tail = self._random.choice(self._tails)
            known = (self._roots[root][1] + tail)[: matching_blocks * self.block_size * 4]
            prompts.append(known + random_tokens(self._random, (length - len(known)) // 4))
        return prompts

    def _new_path(self, num_blocks: int) -> tuple[list[int], bytes]:
        ids = list(itertools.islice(self._ids, num_blocks))
        return ids, random_tokens(self._random, num_blocks * self.block_size)

    def _stored(self, worker: int, parent: int, ids: list[int], tokens: bytes) -> Iterator[Stored]:
        block_bytes = self.block_size * 4
        for first in range(0, len(ids), self.BLOCKS_AN_EVENT):
            part = ids[first : first + self.BLOCKS_AN_EVENT]
            yield Stored(
                worker, parent, part, tokens[first * block_bytes : (first + len(part)) * block_bytes]
            )
            parent = part[-1]


def trace_steps(requests: Sequence[TraceRequest], num_workers: int, blocks_per_worker: int) -> Iterator[Step]:
    """A trace against workers whose caches evict what was used longest ago, the ends of prompts first."""
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_workers)]
    for request in requests:
        ids = [block_id + 1 for block_id in request.full_blocks]
        if ids:
            seed = ids[0] * 1_000_003 + request.number // ROUTE_CHANGES_EVERY
            worker = Random(seed).randrange(num_workers)
            prompt = b"".join(map(_trace_block, request.block_ids))[: request.prompt_tokens * 4]
            yield Step(prompt, _cache_events(caches[worker], worker, ids, prompt, blocks_per_worker))


def _cache_events(
    cache: OrderedDict[int, None], worker: int, ids: list[int], prompt: bytes, capacity: int
) -> list[Event]:
    events: list[Event] = []
    known = next((index for index, block_id in enumerate(ids) if block_id not in cache), len(ids))
    for block_id in reversed(ids):
        cache[block_id] = None
        cache.move_to_end(block_id)
    if known < len(ids):
        parent = ids[known - 1] if known else ROOT_ID
        tokens = prompt[known * BLOCK_TOKENS * 4 : len(ids) * BLOCK_TOKENS * 4]
        events.append(Stored(worker, parent, ids[known:], tokens))
    evicted = [cache.popitem(last=False)[0] for _ in range(len(cache) - capacity)]
    if evicted:
        events.append(Removed(worker, evicted))
    return events


def random_tokens(random: Random, count: int) -> bytes:
    """Ids below 65,536, packed as uint32."""
    return array("I", array("H", random.randbytes(2 * count))).tobytes()


@lru_cache(maxsize=100_000)
def _trace_block(block_id: int) -> bytes:
    """This block's made-up tokens, always the same."""
    digest = hashlib.shake_128(block_id.to_bytes(8, "little")).digest(2 * BLOCK_TOKENS)
    return array("I", array("H", digest)).tobytes()
