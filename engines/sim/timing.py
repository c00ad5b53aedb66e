"""How long a step would take on the hardware that is simulated (sans-IO)."""

from __future__ import annotations

import msgspec

from dynrt.engines.scheduling.work import StepWork


class Roofline(msgspec.Struct, frozen=True, tag="roofline"):
    """A step takes what its arithmetic takes, or its memory traffic, whichever is longer.

    arithmetic: (2 · parameters · tokens + 2 · attention_width · Σ(end² - start²)) / flops
    memory:     (weight_bytes + kv_bytes_per_token · KV tokens that decodes read) / bytes_per_s

    A token of a prompt multiplies and adds once with every parameter; its attention does so twice (scores, values)
    with each token before it, in each layer: 4 · attention_width · (end² - start²) / 2 for a chunk. Decodes read
    all weights and their own KV (roofline of Williams et al. 2009). What a real engine adds to each step (launches,
    sampling, scheduling) is not in it; a fit of that engine's steps has it: see Linear.
    """

    parameters: float
    weight_bytes: float
    attention_width: int  # layers · query heads · head size
    kv_bytes_per_token: int
    flops: float  # per second, as achieved
    bytes_per_s: float  # of memory, as achieved

    def step_s(self, work: StepWork, kv_capacity: int) -> float:
        """Seconds; `kv_capacity` is what the KV cache holds, in tokens."""
        num_tokens = work.prefill_tokens + work.decode_requests
        operations = 2 * self.parameters * num_tokens + 2 * self.attention_width * work.prefill_context
        moved_bytes = self.weight_bytes + self.kv_bytes_per_token * work.decode_kv_tokens
        return max(operations / self.flops, moved_bytes / self.bytes_per_s)


class Linear(msgspec.Struct, frozen=True, tag="linear"):
    """Coefficients fitted from an engine's own steps: those that `planner.coefficients` fits, in milliseconds."""

    step_ms: float
    prefill_token_ms: float
    prefill_context_ms: float  # per end² - start²
    decode_request_ms: float
    decode_kv_token_ms: float

    def step_s(self, work: StepWork, kv_capacity: int) -> float:
        return 1e-3 * (
            self.step_ms
            + self.prefill_token_ms * work.prefill_tokens
            + self.prefill_context_ms * work.prefill_context
            + self.decode_request_ms * work.decode_requests
            + self.decode_kv_token_ms * work.decode_kv_tokens
        )


class DynamoMocker(msgspec.Struct, frozen=True, tag="dynamo-mocker"):
    """The built-in polynomials of NVIDIA Dynamo's mocker (lib/mocker, perf_model.rs): for comparing with it.

    prefill ms = 4.21e-7 T² + 0.01518 T + 16.50, T the step's prompt tokens; decode ms = -25.74 p² + 54.01 p + 5.74,
    at least 1, p the share of the KV cache that is read. A step with both takes both.
    """

    def step_s(self, work: StepWork, kv_capacity: int) -> float:
        num_tokens, kv_share = work.prefill_tokens, work.decode_kv_tokens / kv_capacity
        prefill_ms = 4.21e-7 * num_tokens**2 + 0.01518 * num_tokens + 16.50 if num_tokens else 0.0
        decode_ms = max(1.0, -25.74 * kv_share**2 + 54.01 * kv_share + 5.74) if work.decode_requests else 0.0
        return 1e-3 * (prefill_ms + decode_ms)


Timing = Roofline | Linear | DynamoMocker
