"""A link of given speed between the transfer thread and NIXL, so that slow networks can be measured on one host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from dynrt.transfer.agent import Agent
from dynrt.transfer.deferring import DeferredWrite, DeferringAgent
from dynrt.transfer.units import UnitRange


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

    def __init__(self, inner: Agent, speed: LinkSpeed, layer_block_bytes: int) -> None:
        super().__init__(inner)
        self._link = PacedLink(speed)
        self._layer_block_bytes = layer_block_bytes

    def post_write(
        self,
        peer: str,
        units: UnitRange,
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        notification: bytes,
    ) -> Any:
        num_bytes = units.num_layers * units.num_blocks * self._layer_block_bytes
        due_at = self._link.carry(num_bytes, time.monotonic())
        return DeferredWrite(due_at, peer, units, source_ids, target_ids, notification)
