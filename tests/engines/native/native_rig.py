"""Drives native engines by hand: requests, steps, and handoffs between two of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dynrt.engines.native.engine import NativeEngine
from dynrt.engines.protocol import EngineRequest, Reservation, Token
from dynrt.runtime.messages import SamplingParams
from dynrt.transfer.local import BlocksReady

MAX_STEPS = 1000
PROMPT = [10 + (7 * i * i) % 400 for i in range(75)]


MakeEngine = Callable[..., NativeEngine]


class Recorder:
    """A LayerHook that keeps what it was told, in order."""

    def __init__(self) -> None:
        self.calls: list[list[BlocksReady] | int] = []

    def step_begins(self, ready: list[BlocksReady]) -> None:
        self.calls.append(ready)

    def layer_written(self, layer: int, event: object | None) -> None:
        assert event is None, "no CUDA here"
        self.calls.append(layer)

    @property
    def ready(self) -> list[BlocksReady]:
        return [blocks for call in self.calls if isinstance(call, list) for blocks in call]


def make_request(
    number: int, prompt_ids: Sequence[int], max_tokens: int = 24, prefill_only: bool = False, **sampling: Any
) -> EngineRequest:
    params = SamplingParams(max_tokens, **({"temperature": 0.0, "ignore_eos": True} | sampling))
    return EngineRequest(number.to_bytes(16, "little"), 0, prompt_ids, params, prefill_only=prefill_only)


def run(engine: NativeEngine, hook: Recorder | None = None) -> list[Token]:
    tokens: list[Token] = []
    for _ in range(MAX_STEPS):
        if not engine.has_work():
            return tokens
        tokens += engine.step(hook or Recorder()).tokens
    raise AssertionError("the engine never comes to rest")


def outputs(engine: NativeEngine, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    """Run all prompts at once."""
    requests = [make_request(number, prompt_ids, **options) for number, prompt_ids in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    tokens = run(engine)
    assert engine.load().blocks_active == 0
    return [ids([token for token in tokens if token.key == request.key]) for request in requests]


def copy_blocks(
    source: NativeEngine, source_ids: list[int], target: NativeEngine, target_ids: list[int]
) -> None:
    """A handoff's pushes, by address, as NIXL makes them."""
    num_bytes = source.info.geometry[0].layer_block_bytes
    for ours, theirs in zip(source.kv_memory()[0], target.kv_memory()[0], strict=True):
        for source_id, target_id in zip(source_ids, target_ids, strict=True):
            assert (target_id + 1) * num_bytes <= theirs.num_bytes
            ctypes.memmove(
                theirs.address + target_id * num_bytes, ours.address + source_id * num_bytes, num_bytes
            )


def hand_off(
    source: NativeEngine, target: NativeEngine, request: EngineRequest
) -> tuple[Reservation, list[Token]]:
    """Prefill here, decode there. Returns what was reserved and all tokens."""
    reservation = target.reserve(request)
    assert reservation is not None
    hook = Recorder()
    source.submit(msgspec.structs.replace(request, prefill_only=True))
    [first] = run(source, hook)
    announced = [block_id for blocks in hook.ready for block_id in blocks.block_ids]
    assert len(announced) == -(-hook.ready[0].num_prompt_tokens // 8)
    copy_blocks(source, announced[reservation.first_block :], target, reservation.block_ids)
    assert source.load().blocks_active >= len(announced), "pinned until release"
    source.release(request.key, request.epoch)
    if first.finish_reason is not None:
        target.release(request.key, request.epoch)
        return reservation, [first]
    target.commit(request.key, request.epoch, first.token_id)
    return reservation, [first, *run(target)]


def ids(tokens: Sequence[Token]) -> list[int]:
    return [token.token_id for token in tokens]
