"""One vLLM engine that is both ends of its handoffs: KV is copied between its own blocks, as a push would."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dynrt.engines.protocol import EngineRequest, Reservation, StepOutput, Token
from dynrt.planner.events import CacheEvent
from dynrt.runtime.messages import SamplingParams
from dynrt.transfer.local import BlocksReady

if TYPE_CHECKING:
    from dynrt.engines.vllm.engine import VllmEngine

STEPS_LIMIT = 3000
Id = tuple[bytes, int]


def greedy(max_tokens: int = 12, **fields: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **fields})


def random_prompt(num_tokens: int, seed: int) -> list[int]:
    """Of the tiny model's tokens, none of them special."""
    rng = random.Random(seed)
    return [rng.randrange(5, 512) for _ in range(num_tokens)]


@dataclass
class Copier:
    """The hook: what is announced of a prompt is copied to its target when the hook says that it is written."""

    engine: VllmEngine
    targets: dict[Id, Reservation] = field(default_factory=dict)  # by the id of the prefill
    announced: list[BlocksReady] = field(default_factory=list)
    late: list[BlocksReady] = field(
        default_factory=list
    )  # before their target was known: all written by then
    layers: list[int] = field(default_factory=list)  # told in this step
    growing: list[BlocksReady] = field(default_factory=list)

    def aim(self, prefill: Id, target: Reservation) -> None:
        self.targets[prefill] = target
        for blocks in [blocks for blocks in self.late if (blocks.key, blocks.epoch) == prefill]:
            self._copy_all_layers(blocks)

    def step_begins(self, ready: list[BlocksReady]) -> None:
        self.announced += ready
        self.layers = []
        self.growing = [blocks for blocks in ready if not blocks.written]
        for blocks in ready:
            if blocks.written:
                self._copy_all_layers(blocks)

    def layer_written(self, layer: int, event: object | None) -> None:
        assert layer == len(self.layers) and event is None
        self.layers.append(layer)
        for blocks in self.growing:
            self._copy(blocks, layer)
        if layer == self.num_layers - 1:
            self.late += [b for b in self.growing if (b.key, b.epoch) not in self.targets]
            self.growing = []

    @property
    def num_layers(self) -> int:
        return self.engine.info.geometry[0].num_layers

    def _copy_all_layers(self, blocks: BlocksReady) -> None:
        if (blocks.key, blocks.epoch) not in self.targets:
            self.late.append(blocks)
        for layer in range(self.num_layers):
            self._copy(blocks, layer)

    def _copy(self, blocks: BlocksReady, layer: int) -> None:
        target = self.targets.get((blocks.key, blocks.epoch))
        if target is None:
            return
        size = self.engine.info.geometry[0].layer_block_bytes
        base = self.engine.kv_memory()[0][layer].address
        for index, source in enumerate(blocks.block_ids, blocks.first_block - target.first_block):
            if index >= 0:
                ctypes.memmove(base + target.block_ids[index] * size, base + source * size, size)


class Bench:
    """Drives the engine as the compute thread does, and keeps what it tells."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.copier = Copier(engine)
        self.tokens: dict[Id, list[Token]] = {}
        self.cache_events: list[CacheEvent] = []
        self.outputs: list[StepOutput] = []
        self._num_requests = 0

    def new_id(self) -> Id:
        self._num_requests += 1
        return self._num_requests.to_bytes(16, "big"), 3

    def step(self) -> None:
        output = self.engine.step(self.copier)
        self.outputs.append(output)
        self.cache_events += output.cache_events
        for token in output.tokens:
            self.tokens.setdefault((token.key, token.epoch), []).append(token)

    def run(self, until: Callable[[], bool] | None = None) -> None:
        """Until `until`, or until there is nothing to do."""
        for _ in range(STEPS_LIMIT):
            if until is not None and until():
                return
            if not self.engine.has_work():
                assert until is None, "nothing to do, and what was waited for has not come"
                return
            self.step()
        raise AssertionError(f"{STEPS_LIMIT} steps were not enough")

    def ids(self, request_id: Id) -> list[int]:
        return [token.token_id for token in self.tokens.get(request_id, [])]

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, **fields: object) -> Id:
        request_id = self.new_id()
        self.engine.submit(EngineRequest(*request_id, prompt, sampling, **fields))
        return request_id

    def local(self, prompt: Sequence[int], sampling: SamplingParams, **fields: object) -> list[Token]:
        """Everything on this engine, to its end."""
        request_id = self.submit(prompt, sampling, **fields)
        self.run()
        return self.tokens[request_id]

    def reserve(self, request: EngineRequest) -> Reservation:
        made: list[Reservation] = []

        def is_made() -> bool:
            reservation = self.engine.reserve(request)
            made.extend([] if reservation is None else [reservation])
            return bool(made)

        self.run(is_made)
        return made[0]

    def hand_off(
        self, prompt: Sequence[int], sampling: SamplingParams, *, salt: str = "", prefill_salt: str = "p"
    ) -> list[Token]:
        """Prefill and decode as two requests; the decode's tokens."""
        prefill, decode = self.new_id(), self.new_id()
        target = self.reserve(EngineRequest(*decode, prompt, sampling, salt=salt))
        self.copier.aim(prefill, target)
        self.engine.submit(EngineRequest(*prefill, prompt, sampling, salt=prefill_salt, prefill_only=True))
        self.run(lambda: bool(self.ids(prefill)))
        self.engine.release(*prefill)
        self.engine.commit(*decode, None)
        self.run()
        return self.tokens[decode]

    def assert_clean(self) -> None:
        """No block is held, and vLLM's own tables are empty."""
        self.run()
        load = self.engine.load()
        assert (load.blocks_active, load.waiting_requests, load.running_requests) == (0, 0, 0), load
        assert not self.engine._scheduler.requests
        assert not self.engine._llm.output_processor.request_states
        assert not self.engine.has_work()
