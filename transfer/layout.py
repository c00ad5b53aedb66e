"""The shape of a worker's KV cache, and whether two workers' caches map onto each other."""

from __future__ import annotations

import msgspec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

_MUST_MATCH = ("num_layers", "num_kv_heads", "head_size", "dtype", "block_size", "order")


class KvGeometry(msgspec.Struct, frozen=True):
    """One rank's paged KV cache: per layer one tensor [num_blocks, 2 (K, V), block_size, num_kv_heads, head_size]."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    order: str = "block,kv,token,head,dim"

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of one block of one layer, K and V together: one contiguous run."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * DTYPE_BYTES[self.dtype]


class KvRegion(msgspec.Struct, frozen=True):
    """Where one layer's KV tensor lies: `num_blocks * layer_block_bytes` bytes from `address`."""

    address: int
    num_bytes: int
    device: int | None = None  # CUDA device index; None is host memory


class Mismatch(msgspec.Struct, frozen=True):
    """The first field in which two geometries cannot be mapped onto each other."""

    field: str
    prefill: object
    decode: object

    def __str__(self) -> str:
        return f"{self.field} is {self.prefill!r} on prefill and {self.decode!r} on decode"


def find_mismatch(prefill: KvGeometry, decode: KvGeometry) -> Mismatch | None:
    """None if a prefill worker of the first geometry can push into a decode worker of the second."""
    for field in _MUST_MATCH:
        ours, theirs = getattr(prefill, field), getattr(decode, field)
        if ours != theirs:
            return Mismatch(field, ours, theirs)
    return None
