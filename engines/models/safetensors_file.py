"""Writing bfloat16 weights in the safetensors format, one tensor in memory at a time.

Format: 8 bytes little-endian header length, a JSON header padded with spaces, then the tensors' bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 8
_BF16_BYTES = 2


def write_bf16(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[tuple[str, NDArray[np.float32]]]
) -> None:
    """Write `tensors`, rounded to bfloat16; they come in the order of `shapes`, which is known beforehand."""
    with path.open("wb") as file:
        file.write(_header(shapes))
        for (expected, shape), (name, values) in zip(shapes.items(), tensors, strict=True):
            assert name == expected, f"{name} came where {expected} was announced"
            assert values.shape == shape, f"{name} is {values.shape}, announced was {shape}"
            file.write(round_to_bf16(values).astype("<u2", copy=False).data)


def round_to_bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bit patterns of the nearest bfloat16, ties to even, of finite values."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    tie_to_even = (bits >> 16) & 1
    return ((bits + 0x7FFF + tie_to_even) >> 16).astype(np.uint16)


def _header(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + _BF16_BYTES * math.prod(shape)
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (offset, end)}
        offset = end
    encoded = msgspec.json.encode(entries)
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    return len(encoded).to_bytes(8, "little") + encoded
