"""The notifications that travel over NIXL from the prefill end to the decode end, little-endian, 40 bytes.

`kind, flags, route, first_layer, num_layers, first_piece, num_pieces, epoch, key`, as in units.UnitRange. In checksum
mode the pieces' checksums follow, 4 bytes each, layer after layer.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from dynrt.transfer.events import KEY_BYTES, HandoffMessage
from dynrt.transfer.units import UnitRange

_LAYOUT = struct.Struct(f"<BBHHHIII4x{KEY_BYTES}s")
NOTIFICATION_BYTES = _LAYOUT.size

_WRITTEN, _QUIESCED = 1, 2
_CLEAN = 1


class UnitsWritten(HandoffMessage, frozen=True):
    """Sent with a write: these units lie in the receiver's memory. `checksums`: of each, or none."""

    units: UnitRange
    checksums: tuple[int, ...] = ()


class SenderQuiesced(HandoffMessage, frozen=True):
    """Stands alone: nothing is in flight for this handoff, nothing will be posted again (see events.Quiesced)."""

    clean: bool


class MalformedNotificationError(ValueError):
    """Bytes that no dynrt of this version sends."""


Notification = UnitsWritten | SenderQuiesced


def encode_written(key: bytes, epoch: int, units: UnitRange, checksums: Sequence[int] = ()) -> bytes:
    fixed = _LAYOUT.pack(_WRITTEN, 0, *msgspec.structs.astuple(units), epoch, key)
    return fixed + struct.pack(f"<{len(checksums)}I", *checksums)


def encode_quiesced(key: bytes, epoch: int, *, clean: bool) -> bytes:
    return _LAYOUT.pack(_QUIESCED, _CLEAN if clean else 0, 0, 0, 0, 0, 0, epoch, key)


def decode(packed: bytes) -> Notification:
    """The inverse of the two above. MalformedNotificationError: wrong length or an unknown kind."""
    if len(packed) < NOTIFICATION_BYTES:
        raise MalformedNotificationError(f"{len(packed)} bytes, expected {NOTIFICATION_BYTES}")
    kind, flags, *units, epoch, key = _LAYOUT.unpack_from(packed)
    if kind == _WRITTEN:
        written = UnitRange(*units)
        checksums = _checksums(packed, written.num_layers * written.num_pieces)
        return UnitsWritten(key, epoch, written, checksums)
    if kind == _QUIESCED and len(packed) == NOTIFICATION_BYTES:
        return SenderQuiesced(key, epoch, bool(flags & _CLEAN))
    raise MalformedNotificationError(f"kind {kind}, expected {_WRITTEN} or {_QUIESCED}")


def _checksums(packed: bytes, num_units: int) -> tuple[int, ...]:
    size = len(packed) - NOTIFICATION_BYTES
    if size not in (0, 4 * num_units):
        raise MalformedNotificationError(f"{size} bytes of checksums for {num_units} units")
    return struct.unpack_from(f"<{size // 4}I", packed, NOTIFICATION_BYTES)
