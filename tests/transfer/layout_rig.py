"""KV memory of several ranks in any layout, and prompts whose every value is known, for tests over NIXL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt

from dynrt.transfer.layout import KvGeometry, KvRegion
from dynrt.transfer.local import BlocksReady

NATIVE, HEADS_FIRST = "block,kv,token,head,dim", "block,kv,head,token,dim"
NUM_LAYERS, HEAD_SIZE = 2, 4

Values = npt.NDArray[np.uint16]


def worker(num_ranks: int, num_heads: int, block_size: int, order: str, num_blocks: int) -> list[KvGeometry]:
    """Heads shared out as evenly as they go; with more ranks than heads, neighbours hold the same one."""
    bounds = [rank * num_heads // num_ranks for rank in range(num_ranks + 1)]
    return [
        KvGeometry(
            num_layers=NUM_LAYERS,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=max(1, end - first),
            head_size=HEAD_SIZE,
            dtype="float16",
            order=order,
            first_head=first,
            total_kv_heads=num_heads,
        )
        for first, end in pairwise(bounds)
    ]


class KvMemory:
    """Host memory of all ranks, full of noise; `layers[rank][layer]` is [block, kv, token, head, dim] in any order."""

    def __init__(
        self, geometry: Sequence[KvGeometry], arenas: Sequence[Values], rng: np.random.Generator
    ) -> None:
        self.geometry = geometry
        self._flat = [self._cut(rank, arena) for rank, arena in zip(geometry, arenas, strict=False)]
        for flat in self._flat:
            flat[:] = rng.integers(0, 1 << 16, flat.shape, np.uint16)
        self.layers = [_by_axes(rank, flat) for rank, flat in zip(geometry, self._flat, strict=True)]

    def _cut(self, rank: KvGeometry, arena: Values) -> Values:
        """[layer, value], each layer at the begin of its region of the arena."""
        return arena[:, : rank.num_blocks * rank.layer_block_bytes // 2]

    def copy(self) -> list[Values]:
        return [flat.copy() for flat in self._flat]

    def regions(self) -> list[list[KvRegion]]:
        return [[KvRegion(layer.ctypes.data, layer.nbytes) for layer in flat] for flat in self._flat]

    def put(self, prompt: Prompt, block_ids: Sequence[int], layer: int, first: int, end: int) -> None:
        """What a model computes of tokens [first, end), whose blocks are `block_ids` from the prompt's first on."""
        for rank, geometry in enumerate(self.geometry):
            blocks, offsets = _places(geometry, block_ids, first, end)
            heads = slice(geometry.first_head, geometry.first_head + geometry.num_kv_heads)
            self.layers[rank][layer][blocks, :, offsets] = prompt.kv[layer, first:end, :, heads]


def _by_axes(geometry: KvGeometry, flat: Values) -> list[Values]:
    size, heads = geometry.block_size, geometry.num_kv_heads
    if geometry.order == NATIVE:
        return [layer.reshape(-1, 2, size, heads, HEAD_SIZE) for layer in flat]
    assert geometry.order == HEADS_FIRST
    return [layer.reshape(-1, 2, heads, size, HEAD_SIZE).transpose(0, 1, 3, 2, 4) for layer in flat]


def _places(geometry: KvGeometry, block_ids: Sequence[int], first: int, end: int) -> tuple[Any, Any]:
    positions = np.arange(first, end)
    return np.asarray(block_ids, np.int64)[positions // geometry.block_size], positions % geometry.block_size


@dataclass
class Prompt:
    """Blocks on both sides, counted from the prompt's first; the first ones of `target_ids` are decode's own hit."""

    id: tuple[bytes, int]
    num_tokens: int
    kv: Values  # [layer, token, kv, head, dim]
    source_ids: list[int]
    target_ids: list[int]
    source_hit: int  # blocks
    target_hit: int  # blocks

    @property
    def reserved(self) -> list[int]:
        return self.target_ids[self.target_hit :]

    def ready(self, first_block: int, end_block: int, *, written: bool) -> BlocksReady:
        block_ids = self.source_ids[first_block:end_block]
        return BlocksReady(*self.id, first_block, block_ids, written, self.num_tokens)


class PromptMaker:
    """Prompts of random length and hits, in blocks that no other prompt uses."""

    def __init__(self, source: KvMemory, target: KvMemory, seed: int) -> None:
        self._rng = Random(seed)
        self._values = np.random.default_rng(seed)
        self._source, self._target = source.geometry[0], target.geometry[0]
        self._free = [
            self._rng.sample(range(g.num_blocks), g.num_blocks) for g in (self._source, self._target)
        ]
        self._num_made = 0

    def make(self, most_tokens: int) -> Prompt:
        rng, num_tokens = self._rng, self._rng.randint(1, most_tokens)
        self._num_made += 1
        return Prompt(
            id=(self._num_made.to_bytes(16, "little"), 1),
            num_tokens=num_tokens,
            kv=self._values.integers(
                0, 1 << 16, (NUM_LAYERS, num_tokens, 2, self._source.model_kv_heads, HEAD_SIZE), np.uint16
            ),
            source_ids=self._take(0, -(-num_tokens // self._source.block_size)),
            target_ids=self._take(1, -(-num_tokens // self._target.block_size)),
            source_hit=rng.randint(0, (num_tokens - 1) // self._source.block_size),
            target_hit=rng.choice((0, rng.randint(0, num_tokens // self._target.block_size))),
        )

    def _take(self, side: int, count: int) -> list[int]:
        taken, self._free[side] = self._free[side][:count], self._free[side][count:]
        assert len(taken) == count, "too few blocks for this test"
        return taken


def check(target: KvMemory, before: Sequence[Values], prompts: Sequence[Prompt], piece_tokens: int) -> None:
    """Every rank holds its heads of what was pushed, and nothing else has changed.

    Behind a prompt's last token, the rest of its last piece may hold anything.
    """
    for rank, geometry in enumerate(target.geometry):
        expected, found = _by_axes(geometry, before[rank]), target.layers[rank]
        heads = slice(geometry.first_head, geometry.first_head + geometry.num_kv_heads)
        for prompt, layer in ((prompt, layer) for prompt in prompts for layer in range(NUM_LAYERS)):
            first = prompt.target_hit * geometry.block_size
            blocks, offsets = _places(geometry, prompt.target_ids, first, prompt.num_tokens)
            expected[layer][blocks, :, offsets] = prompt.kv[layer, first:, :, heads]
            end = -(-prompt.num_tokens // piece_tokens) * piece_tokens
            blocks, offsets = _places(geometry, prompt.target_ids, prompt.num_tokens, end)
            expected[layer][blocks, :, offsets] = found[layer][blocks, :, offsets]
        for layer in range(NUM_LAYERS):
            wrong = np.argwhere(expected[layer] != found[layer])
            assert not len(wrong), f"rank {rank}, layer {layer}: (block, kv, token, head, dim) {wrong[0]}"
