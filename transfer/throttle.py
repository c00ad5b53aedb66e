"""A link of given speed between the transfer thread and NIXL, so that slow networks can be measured on one host."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from dynrt.transfer.agent import Agent
from dynrt.transfer.deferring import DeferredWrite, DeferringAgent
from dynrt.transfer.write import Write


class LinkSpeed(msgspec.Struct, frozen=True):
    """What a paced link carries, and how long a byte is on its way."""

    bytes_per_s: float
    latency_s: float = 0.0


class PacedLink:
    """When a link has carried what is given to it, first come, first served (sans-IO)."""

    def __init__(self, speed: LinkSpeed) -> None:
        assert speed.bytes_per_s > 0 and speed.latency_s >= 0, f"{speed} is no link"
        self._speed = speed
        self._free_at = float("-inf")

    def carry(self, num_bytes: int, now: float) -> float:
        """The time at which `num_bytes` given to the link `now` are at its other end."""
        self._free_at = max(now, self._free_at) + num_bytes / self._speed.bytes_per_s
        return self._free_at + self._speed.latency_s


class ThrottledAgent(DeferringAgent):
    """Posts a write once the paced link has carried its bytes: decode sees them no earlier, in one piece."""

    def __init__(self, inner: Agent, speed: LinkSpeed) -> None:
        super().__init__(inner)
        self._link = PacedLink(speed)

    def post_write(self, write: Write, notification: bytes) -> Any:
        return DeferredWrite(self._link.carry(write.num_bytes, time.monotonic()), write, notification)
