"""A simulated engine in virtual time: its steps end when it says, and nothing sleeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

from dynrt.engines.config import EngineConfig, SimConfig
from dynrt.engines.protocol import EngineRequest, Reservation, StepOutput, Token
from dynrt.engines.sim import fingerprint
from dynrt.engines.sim.core import SimCore, SimStep
from dynrt.engines.sim.profile import Profile
from dynrt.engines.sim.timing import Linear
from dynrt.runtime.messages import SamplingParams
from dynrt.transfer.local import BlocksReady

VOCAB = 300
EOS = frozenset({2, 3})
BLOCK_SIZE = 4
MAX_STEPS = 3000
PROFILE = Profile(
    Linear(
        step_ms=5.0,
        prefill_token_ms=0.1,
        prefill_context_ms=0.0,
        decode_request_ms=0.5,
        decode_kv_token_ms=0.001,
    ),
    num_layers=3,
    kv_bytes_per_token=3 << 10,
    kv_capacity=40 * BLOCK_SIZE,
)


def write_model_config(path: Path) -> Path:
    """As much of a model directory as a simulated engine reads."""
    path.mkdir(exist_ok=True)
    config = {"vocab_size": VOCAB, "max_position_embeddings": 512, "eos_token_id": sorted(EOS)}
    (path / "config.json").write_text(json.dumps(config))
    return path


def sim_config(model_dir: Path, *, speedup: float = 1.0, **changes: Any) -> EngineConfig:
    settings = {"block_size": BLOCK_SIZE, "max_batch_tokens": 16, "max_batch_requests": 8} | changes
    return EngineConfig(str(model_dir), "tiny", kind="sim", sim=SimConfig(speedup=speedup), **settings)


def make_request(
    number: int, prompt_ids: Sequence[int], max_tokens: int = 6, *, salt: str = "", **changes: Any
) -> EngineRequest:
    prefill_only, output_ids = changes.pop("prefill_only", False), changes.pop("output_ids", ())
    sampling = SamplingParams(max_tokens=max_tokens, **changes)
    key = number.to_bytes(16, "little")
    return EngineRequest(key, 0, prompt_ids, sampling, output_ids, salt, prefill_only)


def expected_outputs(
    prompt_ids: Sequence[int], count: int, vocab_size: int = VOCAB, eos_token_ids: Set[int] = EOS
) -> list[int]:
    """The first `count` tokens behind a prompt, by the definition: a function of all tokens so far."""
    prefixes: list[int] = []
    fingerprint.extend(prefixes, prompt_ids)
    token_ids: list[int] = []
    for _ in range(count):
        token_ids.append(fingerprint.choose_token(prefixes[-1], vocab_size, eos_token_ids))
        fingerprint.extend(prefixes, token_ids[-1:])
    return token_ids


class VirtualEngine:
    """A SimCore, the time, and what its transfer thread would know."""

    def __init__(self, config: EngineConfig, profile: Profile = PROFILE) -> None:
        self.core = SimCore(config, profile)
        self.now = 100.0
        self.ready: dict[bytes, list[BlocksReady]] = {}

    def step(self, while_running: Callable[[SimStep], None] = lambda step: None) -> StepOutput:
        """One whole step, layer by layer."""
        step = self.core.plan_step(self.now)
        for blocks in step.ready:
            self.ready.setdefault(blocks.key, []).append(blocks)
        for layer in range(step.num_layers):
            assert step.started_at <= step.layer_at(layer) <= step.ends_at
            self.core.write_layer(step, layer)
        while_running(step)
        self.now = step.ends_at
        return self.core.finish_step(step, self.now)

    def run(self) -> list[Token]:
        """Until there is nothing to do."""
        tokens: list[Token] = []
        for _ in range(MAX_STEPS):
            if not self.core.has_work():
                return tokens
            tokens += self.step().tokens
        raise AssertionError("the engine never comes to rest")

    def push(self, request: EngineRequest, target: VirtualEngine, reservation: Reservation) -> None:
        """What transfers do with the blocks announced for a request: copy those that the target wants."""
        announced = [block_id for blocks in self.ready[request.key] for block_id in blocks.block_ids]
        source_ids = announced[reservation.first_block :]
        for layer in range(self.core.profile.num_layers):
            target.core.kv.copy_blocks(self.core.kv, layer, source_ids, reservation.block_ids)


def outputs(tokens: Sequence[Token], request: EngineRequest) -> list[int]:
    assert [token.error for token in tokens if token.key == request.key and token.error] == []
    return [token.token_id for token in tokens if token.key == request.key]
