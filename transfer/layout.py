"""The shape of a worker's KV cache; how two of them map onto each other is transfer/mapping.py."""

from __future__ import annotations

from math import prod

import msgspec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

INNER_AXES = ("kv", "token", "head", "dim")


class KvGeometry(msgspec.Struct, frozen=True):
    """One rank's paged KV cache: per layer one tensor of the axes named in `order`, without gaps, blocks outermost.

    Axes: block, kv (K, then V), token (of a block), head, dim. A name that is none of these stands for all that are
    missing, in an order of the engine's own: such bytes are moved together or not at all.
    Raises ValueError for an order or a range of heads that cannot be.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int  # held by this rank
    head_size: int
    dtype: str
    order: str = "block,kv,token,head,dim"
    first_head: int = 0  # this rank holds heads first_head, first_head + 1, … of the model's
    total_kv_heads: int = 0  # of the model; 0: num_kv_heads, all are here. Ranks may hold the same heads

    def __post_init__(self) -> None:
        if self.first_head + self.num_kv_heads > self.model_kv_heads:
            raise ValueError(
                f"heads {self.first_head} … {self.first_head + self.num_kv_heads - 1} of {self.model_kv_heads}"
            )
        first, *inner = self.order.split(",")
        missing, unknown = set(INNER_AXES) - set(inner), set(inner) - set(INNER_AXES)
        is_whole = len(unknown) == 1 if missing else not unknown
        if first != "block" or not is_whole or len(set(inner)) != len(inner):
            raise ValueError(f"order {self.order!r} is not block and then each of {', '.join(INNER_AXES)}")

    @property
    def model_kv_heads(self) -> int:
        """KV heads of the model, on whatever ranks."""
        return self.total_kv_heads or self.num_kv_heads

    def heads(self) -> range:
        """Those of the model's KV heads that this rank holds."""
        return range(self.first_head, self.first_head + self.num_kv_heads)

    def axes(self) -> list[tuple[str, int]]:
        """The axes inside a block and their sizes, outermost first."""
        sizes = {"kv": 2, "token": self.block_size, "head": self.num_kv_heads, "dim": self.head_size}
        inner = self.order.split(",")[1:]
        missing = prod(size for axis, size in sizes.items() if axis not in inner)
        return [(axis, sizes.get(axis, missing)) for axis in inner]

    def tells_apart(self, axis: str) -> bool:
        """Whether `order` says where one index of that axis ends and the next begins."""
        return axis in self.order.split(",")

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
