"""What the two ends of a handoff ask the transfer thread to do."""

from __future__ import annotations

import msgspec

from dynrt.transfer.events import FromDecodeEnd, FromPrefillEnd
from dynrt.transfer.local import ToCompute


class Tell(msgspec.Struct, frozen=True):
    """Send to the runtime."""

    message: FromPrefillEnd | FromDecodeEnd


class Order(msgspec.Struct, frozen=True):
    """Hand to the compute thread."""

    order: ToCompute


class Notify(msgspec.Struct, frozen=True):
    """Send to `peer` over NIXL, tied to no write."""

    peer: str
    notification: bytes


PrefillEffect = Tell | Order | Notify
DecodeEffect = Tell | Order
