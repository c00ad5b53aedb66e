"""When bytes that are sent over a link have arrived (sans-IO)."""

from __future__ import annotations

import msgspec


class Link(msgspec.Struct, frozen=True):
    """A rate, and what each send costs beside it."""

    bytes_per_s: float
    send_s: float

    def transfer_s(self, num_bytes: float) -> float:
        return self.send_s + num_bytes / self.bytes_per_s


class LinkQueue:
    """Sends one after the other, in the order in which they are handed over."""

    def __init__(self, link: Link, speedup: float = 1.0) -> None:
        self._link = link
        self._speedup = speedup
        self._free_at = float("-inf")

    def send(self, now: float, num_bytes: float) -> float:
        """When `num_bytes` handed over at `now` have arrived."""
        self._free_at = max(now, self._free_at) + self._link.transfer_s(num_bytes) / self._speedup
        return self._free_at
