"""The one set of cost terms, in milliseconds, from which every choice is made (sans-IO)."""

from __future__ import annotations

import msgspec

from dynrt.planner.coefficients import Coefficients
from dynrt.planner.load import Load

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


def uncached_ms(coefficients: Coefficients, prompt_tokens: int, cached_tokens: int) -> float:
    """a1·(n - p) + a2·(n² - p²): computing n tokens of which p are cached."""
    linear = coefficients.prefill_token_ms * (prompt_tokens - cached_tokens)
    return linear + coefficients.prefill_context_ms * (prompt_tokens**2 - cached_tokens**2)


def queue_ms(coefficients: Coefficients, load: Load, capacity_tokens: int, new_tokens: int) -> float:
    """Until the prompt tokens that wait on a worker are computed, and `new_tokens` have room in its KV cache.

    What must be preempted to make room will be computed again.
    """
    waiting_ms = 0.0
    if load.prefill_requests:
        tokens_ms = coefficients.prefill_token_ms * load.prefill_tokens
        context_ms = coefficients.prefill_context_ms * load.prefill_context
        waiting_ms = coefficients.step_ms * load.prefill_requests + tokens_ms + context_ms
    missing_tokens = load.held_tokens + new_tokens - capacity_tokens
    if missing_tokens > 0:
        waiting_ms += coefficients.prefill_token_ms * missing_tokens
    return waiting_ms


def batch_ms(coefficients: Coefficients, load: Load, kv_tokens: int, output_tokens: int) -> float:
    """What a worker's decode batch and a request of `kv_tokens` that joins it cost each other.

    The batch makes each of the request's steps longer, and the request each step of all others.
    """
    requests = load.decode_requests
    if not requests:
        return 0.0
    request_ms, kv_token_ms = coefficients.decode_request_ms, coefficients.decode_kv_token_ms
    its_delay = request_ms * requests + kv_token_ms * load.decode_kv_tokens
    their_delay = requests * (request_ms + kv_token_ms * kv_tokens)
    return min(output_tokens, DECODE_HORIZON) * (its_delay + their_delay)


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
