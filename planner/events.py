"""What a worker tells the planner's index about its prefix cache."""

from __future__ import annotations

import msgspec

ROOT = 0  # the parent key of a prompt's first block


class BlocksStored(msgspec.Struct, frozen=True, tag=True):
    """Consecutive full blocks entered the cache, the first of them below block `parent_key`.

    `keys` are the worker's own names for the blocks, never used twice in one incarnation; `token_ids` holds
    their tokens as packed little-endian uint32, `len(keys) * block_size * 4` bytes.
    """

    parent_key: int
    keys: list[int]
    token_ids: bytes
    salt: str = ""  # (adapter, tenant) of the prompt; matters where parent_key is ROOT


class BlocksRemoved(msgspec.Struct, frozen=True, tag=True):
    """These blocks left the cache."""

    keys: list[int]


class CacheCleared(msgspec.Struct, frozen=True, tag=True):
    """The worker's cache is empty."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


class CacheEvents(msgspec.Struct, frozen=True, tag=True):
    """A run of events numbered `first_seq, first_seq + 1, …` within one incarnation."""

    first_seq: int
    events: list[CacheEvent]


class CacheSnapshot(msgspec.Struct, frozen=True, tag=True):
    """Everything in the cache just before event `next_seq`; parents come before their children."""

    next_seq: int
    stored: list[BlocksStored]
