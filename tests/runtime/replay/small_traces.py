"""Traces and fleets for replays that take a moment."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dynrt.planner.traces import TraceRequest
from dynrt.runtime.replay.replay import ReplayConfig, Served

BLOCK = 16

PROFILE = """{
    "timing": {"type": "linear", "step_ms": 5.0, "prefill_token_ms": 0.1, "prefill_context_ms": 0.0,
               "decode_request_ms": 0.5, "decode_kv_token_ms": 0.001},
    "num_layers": 4, "kv_bytes_per_token": 4096, "kv_capacity": 4096,
    "link": {"bytes_per_s": 1e6, "send_s": 1e-5}
}"""


def write_profile(directory: Path) -> str:
    """100 tokens of KV cross its slow link in 0.4 s: longer than they are computed."""
    path = directory / "profile.json"
    path.write_text(PROFILE)
    return str(path)


def small_config(profile: str, **changes: object) -> ReplayConfig:
    settings: dict[str, object] = {"prefill": 1, "decode": 1, "block_size": BLOCK, "local_prefill": "never"}
    return ReplayConfig(profile=profile, **(settings | changes))  # type: ignore[arg-type]


def ask(number: int, at: float, tokens: int, outputs: int, block_ids: Sequence[int] = ()) -> TraceRequest:
    """Without block ids: a prompt that shares nothing."""
    num_blocks = -(-tokens // BLOCK)
    own = range(1000 * (number + 1), 1000 * (number + 1) + num_blocks)
    return TraceRequest(number, at, tokens, outputs, [*block_ids, *own[len(block_ids) :]], BLOCK)


def errors(served: Sequence[Served]) -> list[str]:
    return [one.error for one in served if one.error is not None]
