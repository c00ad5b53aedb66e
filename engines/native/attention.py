"""Attention over the paged KV cache: what is laid out once per step, and what runs in every layer.

The cache of one layer is [num_blocks, 2 (K, V), block_size, num_kv_heads, head_size]. Seen as rows of one token's
heads, block b keeps token t's key in row (2 b) block_size + t and its value block_size rows further on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from dynrt.engines.native.batch import Chunk

_SMALLEST_SPLIT_TOKENS = 256  # below this, one padded call is cheaper than two calls


class AttentionPlan:
    """Where one step's tokens go in the cache, and what they attend to.

    `chunks` in the order of the step's rows: single tokens first, by context length, then longer chunks.
    """

    def __init__(self, chunks: Sequence[Chunk], kv: torch.Tensor) -> None:
        """`kv` is any layer's cache."""
        block_size = kv.shape[2]
        num_singles = sum(len(chunk.token_ids) == 1 for chunk in chunks)
        self._key_rows = torch.tensor(_key_rows(chunks, block_size), device=kv.device)
        self._value_rows = self._key_rows + block_size
        self._parts: list[_DecodeGroup | _PrefillChunk] = [
            _DecodeGroup(chunks[first:end], first, kv)
            for first, end in group_by_length([chunk.end for chunk in chunks[:num_singles]])
        ]
        row = num_singles
        for chunk in chunks[num_singles:]:
            self._parts.append(_PrefillChunk(chunk, row, kv))
            row += len(chunk.token_ids)

    def write(self, kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put this step's `k` and `v`, both [tokens, num_kv_heads, head_size], into a layer's cache."""
        rows = kv.view(-1, *kv.shape[3:])
        rows.index_copy_(0, self._key_rows, k)
        rows.index_copy_(0, self._value_rows, v)

    def attend(self, kv: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attend from `q` [tokens, num_heads, head_size] to the written cache; `k` and `v` as in `write`.

        Returns [tokens, num_heads * head_size].
        """
        half_blocks = kv.view(-1, *kv.shape[2:])
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._parts:
            out[part.rows] = part.attend(half_blocks, q[part.rows], k[part.rows], v[part.rows])
        return out.flatten(1)


class _Context:
    """The K and V of some blocks, copied out of a layer's cache into buffers that all layers of the step share."""

    __slots__ = ("_half_block_ids", "keys", "values")

    def __init__(self, block_ids: Sequence[Sequence[int]], kv: torch.Tensor) -> None:
        """`block_ids` are as many lists of one length as `keys` and `values` have sequences."""
        num_sequences, num_blocks = len(block_ids), len(block_ids[0])
        _, _, block_size, num_kv_heads, head_size = kv.shape
        self._half_block_ids = 2 * torch.tensor(block_ids, device=kv.device).flatten()
        shape = (num_sequences, num_blocks * block_size, num_kv_heads, head_size)
        self.keys = torch.empty(shape, dtype=kv.dtype, device=kv.device)
        self.values = torch.empty_like(self.keys)

    def load(self, half_blocks: torch.Tensor) -> None:
        """Copy from a layer's cache, seen as [2 num_blocks, block_size, num_kv_heads, head_size]."""
        shape = (-1, *half_blocks.shape[1:])
        torch.index_select(half_blocks, 0, self._half_block_ids, out=self.keys.view(shape))
        torch.index_select(half_blocks, 0, self._half_block_ids + 1, out=self.values.view(shape))


class _DecodeGroup:
    """Single tokens of sequences of similar length, attended to in one call over padded block tables."""

    __slots__ = ("_context", "_mask", "rows")

    def __init__(self, chunks: Sequence[Chunk], first_row: int, kv: torch.Tensor) -> None:
        self.rows = slice(first_row, first_row + len(chunks))
        block_size = kv.shape[2]
        num_blocks = _num_blocks(chunks[-1], block_size)
        self._context = _Context([_padded_blocks(chunk, num_blocks, block_size) for chunk in chunks], kv)
        lengths = torch.tensor([chunk.end for chunk in chunks], device=kv.device)
        positions = torch.arange(num_blocks * block_size, device=kv.device)
        self._mask = _additive(positions < lengths[:, None], kv.dtype)[:, None, None]

    def attend(
        self, half_blocks: torch.Tensor, q: torch.Tensor, _k: torch.Tensor, _v: torch.Tensor
    ) -> torch.Tensor:
        """The query heads that share a KV head are rows of one product: K and V are read once for all of them."""
        self._context.load(half_blocks)
        num_sequences, num_heads, head_size = q.shape
        grouped = q.view(num_sequences, half_blocks.shape[2], -1, head_size)
        keys, values = self._context.keys.transpose(1, 2), self._context.values.transpose(1, 2)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask)
        return out.reshape(num_sequences, num_heads, head_size)


class _PrefillChunk:
    """Several tokens of one sequence: to each other causally, and to all that is in the cache before them."""

    __slots__ = ("_context", "_length", "_mask", "rows")

    def __init__(self, chunk: Chunk, first_row: int, kv: torch.Tensor) -> None:
        self.rows = slice(first_row, first_row + len(chunk.token_ids))
        self._length = chunk.end
        self._context: _Context | None = None
        self._mask: torch.Tensor | None = None
        if chunk.start > 0:
            self._context = _Context([chunk.block_ids[: _num_blocks(chunk, kv.shape[2])]], kv)
            self._mask = _prefix_mask(chunk, kv)

    def attend(
        self, half_blocks: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if self._context is not None:
            self._context.load(half_blocks)
            k, v = self._context.keys[0, : self._length], self._context.values[0, : self._length]
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            k.transpose(0, 1)[None],
            v.transpose(0, 1)[None],
            attn_mask=self._mask,
            is_causal=self._mask is None,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


def _key_rows(chunks: Sequence[Chunk], block_size: int) -> list[int]:
    """The row of each token's key, see the module."""
    return [
        2 * block_size * chunk.block_ids[position // block_size] + position % block_size
        for chunk in chunks
        for position in range(chunk.start, chunk.end)
    ]


def group_by_length(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Cut ascending context lengths into runs [first, end) in which none is padded to over twice its length."""
    groups: list[tuple[int, int]] = []
    end = len(lengths)
    while end > 0:
        first = end - 1
        while first > 0 and 2 * max(lengths[first - 1], _SMALLEST_SPLIT_TOKENS) >= lengths[end - 1]:
            first -= 1
        groups.append((first, end))
        end = first
    return groups


def _num_blocks(chunk: Chunk, block_size: int) -> int:
    """Blocks that hold the chunk's sequence up to its end; its block table may be longer."""
    return -(-chunk.end // block_size)


def _padded_blocks(chunk: Chunk, num_blocks: int, block_size: int) -> list[int]:
    """Padded with a block of the same sequence: a masked NaN would spoil the sum, so let it be nobody else's."""
    block_ids = chunk.block_ids[: _num_blocks(chunk, block_size)]
    return block_ids + block_ids[-1:] * (num_blocks - len(block_ids))


def _prefix_mask(chunk: Chunk, kv: torch.Tensor) -> torch.Tensor:
    """Token i of the chunk sees positions up to start + i. On CUDA a symbolic mask: its kernels need no matrix."""
    if kv.device.type == "cuda":
        symbolic: torch.Tensor = causal_lower_right(len(chunk.token_ids), chunk.end)
        return symbolic
    positions = torch.arange(chunk.end)
    return _additive(positions <= positions[chunk.start :, None], kv.dtype)


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, else -inf: the form that attention would otherwise make of a boolean mask in every layer."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(
        ~visible, float("-inf")
    )
