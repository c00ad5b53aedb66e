"""The one set of cost terms, in milliseconds, from which every choice is made (sans-IO)."""

from __future__ import annotations

import msgspec

UNCACHED_EXTRA = 7
"""k of `score_ms = expected_ms + k · uncached_ms`: uncached tokens count 8 times in all.

A hit kept also serves those who come after. docs/planner.md shows what other values do on two traces at three loads.
"""

EQUAL_WITHIN = 0.01
"""Scores that differ less are equal, and the choice is by lot.

Fits of equal workers are never quite equal (by 1e-5 where steps do not scatter at all), and without a lot the one that
seems fastest gets most requests that find the fleet idle. How wide to draw it is a choice: docs/planner.md.
"""

DECODE_HORIZON = 32  # decode slowdown is counted over at most so many tokens: how long it lasts is not known

WRITE_FRACTION = 0.1  # of a layer's time passes until its KV is written (projections and rotary embedding)


class Terms(msgspec.Struct, frozen=True):
    """What a request waits for and what it costs others, in milliseconds."""

    queue_ms: float  # prompt tokens before it
    compute_ms: float  # its own uncached tokens
    transfer_ms: float = 0.0  # exposed: what its compute does not hide
    handoff_ms: float = 0.0  # fixed cost of a handoff
    decode_ms: float = 0.0  # slower steps, for it and for those it joins

    @property
    def expected_ms(self) -> float:
        return self.queue_ms + self.compute_ms + self.transfer_ms + self.handoff_ms + self.decode_ms

    def describe(self) -> str:
        """The sum and its parts, for people."""
        parts = ", ".join(
            f"{name.removesuffix('_ms')} {getattr(self, name):.1f}" for name in self.__struct_fields__
        )
        return f"{self.expected_ms:.1f} ms ({parts})"


def exposed_transfer_ms(
    compute_ms: float, num_layers: int, fresh_bytes: float, cached_bytes: float, bytes_per_ms: float
) -> float:
    """The least time by which a layer-wise push ends after its compute (docs/planner.md, `transfer_ms`).

    `fresh_bytes` appear layer by layer, a little after each layer starts; `cached_bytes` can go at time zero.
    """
    layer_compute_ms = compute_ms / num_layers
    written_ms = WRITE_FRACTION * layer_compute_ms
    last_layer_ms = fresh_bytes / num_layers / bytes_per_ms
    link_ms = (fresh_bytes + cached_bytes) / bytes_per_ms
    idle_ms = 0.0 if cached_bytes else written_ms  # until the link has something to carry
    return max(0.0, last_layer_ms - (layer_compute_ms - written_ms), idle_ms + link_ms - compute_ms)
