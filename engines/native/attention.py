"""Attention over the paged KV cache: what is laid out once per step, and what runs in every layer.

The cache of one layer is [num_blocks, 2 (K, V), block_size, num_kv_heads, head_size]. Seen as rows of one token's
heads, block b keeps token t's key in row (2 b) block_size + t and its value block_size rows further on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from dynrt.engines.scheduling.batch import Chunk

_SMALLEST_SPLIT_TOKENS = 256  # below this, one padded call is cheaper than two calls
_CPU_SCRATCH_BYTES = (
    1 << 20
)  # of K, and as much of V: both must still be in the CPU's cache when they are used


class AttentionPlan:
    """Where one step's tokens go in the cache, and what they attend to.

    `chunks` in the order of the step's rows: single tokens first, by context length, then longer chunks.
    """

    def __init__(self, chunks: Sequence[Chunk], kv: torch.Tensor) -> None:
        """`kv` is any layer's cache."""
        block_size = kv.shape[2]
        self._key_rows = torch.tensor(_key_rows(chunks, block_size), device=kv.device)
        self._value_rows = self._key_rows + block_size
        num_singles = sum(len(chunk.token_ids) == 1 for chunk in chunks)
        groups = group_by_length([chunk.end for chunk in chunks[:num_singles]], _max_group_tokens(kv))
        self._parts: list[_Decodes | _PrefillChunk] = [
            _Decodes(chunks[first:end], first, kv) for first, end in groups
        ]
        row = num_singles
        for chunk in chunks[num_singles:]:
            self._parts.append(_PrefillChunk(chunk, row, kv))
            row += len(chunk.token_ids)
        scratch_tokens = max(part.context.num_tokens for part in self._parts)
        self._scratch = torch.empty((2, scratch_tokens, *kv.shape[3:]), dtype=kv.dtype, device=kv.device)

    def write(self, kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put this step's `k` and `v`, both [tokens, num_kv_heads, head_size], into a layer's cache."""
        rows = kv.view(-1, *kv.shape[3:])
        rows.index_copy_(0, self._key_rows, k)
        rows.index_copy_(0, self._value_rows, v)

    def attend(self, kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Attend from `q` [tokens, num_heads, head_size] to a layer's cache, this step's tokens already in it.

        Returns [tokens, num_heads * head_size].
        """
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for part in self._parts:
            keys, values = part.context.load(kv, self._scratch)
            out[part.rows] = part.attend(q[part.rows], keys, values)
        return out.flatten(1)


class _Decodes:
    """Single tokens of sequences of similar length, attended to in one call over padded block tables."""

    __slots__ = ("_mask", "context", "rows")

    def __init__(self, chunks: Sequence[Chunk], first_row: int, kv: torch.Tensor) -> None:
        self.rows = slice(first_row, first_row + len(chunks))
        block_size = kv.shape[2]
        num_blocks = _num_blocks(chunks[-1], block_size)
        self.context = _Context([_padded_blocks(chunk, num_blocks, block_size) for chunk in chunks], kv)
        lengths = torch.tensor([chunk.end for chunk in chunks], device=kv.device)
        positions = torch.arange(num_blocks * block_size, device=kv.device)
        self._mask = _additive(positions < lengths[:, None], kv.dtype)[:, None, None]

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """The query heads that share a KV head are rows of one product: K and V are read once for all of them."""
        num_sequences, num_heads, head_size = q.shape
        grouped = q.view(num_sequences, keys.shape[2], -1, head_size)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask)
        return out.reshape(num_sequences, num_heads, head_size)


class _PrefillChunk:
    """Several tokens of one sequence, attending to each other causally and to all that precedes them."""

    __slots__ = ("_length", "_mask", "context", "rows")

    def __init__(self, chunk: Chunk, first_row: int, kv: torch.Tensor) -> None:
        self.rows = slice(first_row, first_row + len(chunk.token_ids))
        self.context = _Context([chunk.block_ids[: _num_blocks(chunk, kv.shape[2])]], kv)
        self._length = chunk.end
        self._mask = _causal_mask(chunk, kv) if chunk.start > 0 else None

    def attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[:, : self._length].transpose(1, 2),
            values[:, : self._length].transpose(1, 2),
            attn_mask=self._mask,
            is_causal=self._mask is None,
            enable_gqa=True,
        )
        return out[0].transpose(0, 1)


class _Context:
    """The blocks that some sequences attend to, equally many for each."""

    __slots__ = ("_key_ids", "_shape", "_value_ids", "num_tokens")

    def __init__(self, block_ids: Sequence[Sequence[int]], kv: torch.Tensor) -> None:
        """`kv` is any layer's cache."""
        ids = torch.tensor(block_ids, device=kv.device)
        self._key_ids = 2 * ids.flatten()
        self._value_ids = self._key_ids + 1
        self.num_tokens = ids.numel() * kv.shape[2]
        self._shape = (len(block_ids), -1, *kv.shape[3:])

    def load(self, kv: torch.Tensor, scratch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy K and V out of a layer's cache; each [sequences, tokens, num_kv_heads, head_size], in `scratch`.

        One scratch serves all parts of a step in all layers, so that it stays in the CPU's cache.
        """
        half_blocks = kv.view(-1, *kv.shape[2:])
        keys, values = scratch[0, : self.num_tokens], scratch[1, : self.num_tokens]
        torch.index_select(half_blocks, 0, self._key_ids, out=keys.view(-1, *kv.shape[2:]))
        torch.index_select(half_blocks, 0, self._value_ids, out=values.view(-1, *kv.shape[2:]))
        return keys.view(self._shape), values.view(self._shape)


def group_by_length(lengths: Sequence[int], max_tokens: int) -> list[tuple[int, int]]:
    """Cut ascending context lengths into groups [first, end).

    None is padded to over twice its length, and a group of several has at most `max_tokens` with its padding.
    """
    groups: list[tuple[int, int]] = []
    end = len(lengths)
    while end > 0:
        longest, first = lengths[end - 1], end - 1
        while (
            first > 0
            and longest <= 2 * max(lengths[first - 1], _SMALLEST_SPLIT_TOKENS)
            and longest * (end - first + 1) <= max_tokens
        ):
            first -= 1
        groups.append((first, end))
        end = first
    return groups


def _max_group_tokens(kv: torch.Tensor) -> int:
    """On CPU, what the scratch has room for; on CUDA, where a call costs more than its padding, no limit."""
    if kv.device.type != "cpu":
        return sys.maxsize
    return _CPU_SCRATCH_BYTES // kv[0, 0, 0].nbytes


def _key_rows(chunks: Sequence[Chunk], block_size: int) -> list[int]:
    """The row of each token's key, see the module."""
    return [
        2 * block_size * chunk.block_ids[position // block_size] + position % block_size
        for chunk in chunks
        for position in range(chunk.start, chunk.end)
    ]


def _num_blocks(chunk: Chunk, block_size: int) -> int:
    """Blocks that hold the chunk's sequence up to its end; its block table may be longer."""
    return -(-chunk.end // block_size)


def _padded_blocks(chunk: Chunk, num_blocks: int, block_size: int) -> list[int]:
    """Padded with a block of the same sequence: a masked NaN would spoil the sum, so let it be nobody else's."""
    block_ids = chunk.block_ids[: _num_blocks(chunk, block_size)]
    return block_ids + block_ids[-1:] * (num_blocks - len(block_ids))


def _causal_mask(chunk: Chunk, kv: torch.Tensor) -> torch.Tensor:
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
