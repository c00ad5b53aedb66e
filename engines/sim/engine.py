"""The simulated engine in wall-clock time: sleeps for as long as its model of time says that a step takes."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from dynrt.engines.config import EngineConfig
from dynrt.engines.protocol import LayerHook, StepOutput
from dynrt.engines.sim.core import SimCore, SimStep
from dynrt.engines.sim.link import LinkQueue
from dynrt.transfer.local import BlocksReady


class Crossing(msgspec.Struct, frozen=True):
    """Stands where a CUDA event would: happens when the simulated link has carried a layer across.

    The transfer thread pushes the layer's few real bytes then, so they arrive when those of a real KV cache would.
    """

    ends_at: float  # time.monotonic()

    def query(self) -> bool:
        return time.monotonic() >= self.ends_at


class SimEngine(SimCore):
    """See engines.protocol.Engine. Raises ConfigError or ModelLoadError if it cannot be built."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._link = LinkQueue(self.profile.link, config.sim.speedup)

    def step(self, hook: LayerHook) -> StepOutput:
        step = self.plan_step(time.monotonic())
        if step.ready:
            hook.step_begins(step.ready)
            self._send_hits(step)
        if step.grows:
            self._pace_layers(step, hook)
        else:
            self.write_all_layers(step)
        _sleep_until(step.ends_at)
        return self.finish_step(step, time.monotonic())

    def close(self) -> None:
        """Free the memory; nothing else may be called afterwards."""
        del self.kv

    def _send_hits(self, step: SimStep) -> None:
        """What prefix hits bring to a handoff is there at once, and goes ahead of the layers over the link."""
        num_bytes = self._layer_bytes(blocks for blocks in step.ready if blocks.written)
        if num_bytes:
            self._link.send(step.started_at, num_bytes * step.num_layers)

    def _pace_layers(self, step: SimStep, hook: LayerHook) -> None:
        num_bytes = self._layer_bytes(blocks for blocks in step.ready if not blocks.written)
        for layer in range(step.num_layers):
            _sleep_until(step.layer_at(layer))
            self.write_layer(step, layer)
            hook.layer_written(layer, Crossing(self._link.send(time.monotonic(), num_bytes)))

    def _layer_bytes(self, ready: Iterable[BlocksReady]) -> float:
        """Of these blocks, as they would be with the simulated model."""
        num_blocks = sum(len(blocks.block_ids) for blocks in ready)
        return self.profile.kv_bytes(num_blocks * self.info.geometry[0].block_size)


def _sleep_until(then: float) -> None:
    remaining_s = then - time.monotonic()
    if remaining_s > 0:  # a sleep of no length still gives the processor away
        time.sleep(remaining_s)
