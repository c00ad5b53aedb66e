"""What every simulated engine is made of: a real scheduler, real block accounting, and the time that steps take.

Sans-IO. Nothing here knows what lies in the blocks; `engines.sim.core` adds that.
"""

from __future__ import annotations

import msgspec

from dynrt.engines.config import EngineConfig
from dynrt.engines.protocol import EngineInfo, StepOutput, Token
from dynrt.engines.scheduling.limits import limits_of
from dynrt.engines.scheduling.scheduled import ScheduledEngine
from dynrt.engines.scheduling.scheduler import Batch
from dynrt.engines.scheduling.work import StepWork
from dynrt.engines.sim.profile import Profile
from dynrt.runtime.errors import ConfigError
from dynrt.transfer.local import BlocksReady

_WRITTEN_AT = 0.1  # share of a layer after which its KV is there: norm, QKV projection and rotary embedding


class TimedStep(msgspec.Struct, frozen=True):
    """One step under way. Times are on the clock of `plan_step`'s argument."""

    started_at: float
    ends_at: float
    work: StepWork
    batch: Batch
    refused: list[Token]
    num_layers: int

    @property
    def ready(self) -> list[BlocksReady]:
        """For `LayerHook.step_begins`, if there are any."""
        return self.batch.ready

    @property
    def grows(self) -> bool:
        """Whether the hook is to be told of layers."""
        return any(not blocks.written for blocks in self.batch.ready)

    def layer_at(self, layer: int) -> float:
        """When this layer's KV is written."""
        return self.started_at + (self.ends_at - self.started_at) * (layer + _WRITTEN_AT) / self.num_layers


class TimedCore(ScheduledEngine):
    """Requests are handled as in engines.protocol.Engine; subclasses say how a step is planned and finished."""

    def __init__(
        self, config: EngineConfig, info: EngineInfo, profile: Profile, *, checks_ids: bool = True
    ) -> None:
        """`checks_ids`: look at every token id of a request, which takes long where nothing is computed."""
        geometry = info.geometry[0]
        limits = limits_of(config, info)
        if not checks_ids:
            limits = msgspec.structs.replace(limits, vocab_size=None)
        super().__init__(info, limits)
        self.profile = profile
        self._speedup = config.sim.speedup
        self._kv_capacity = geometry.num_blocks * geometry.block_size

    # --- steps ----------------------------------------------------------------------------------------

    def plan_step(self, now: float) -> TimedStep:
        """Begin a step at `now`; one without anything to compute ends at once."""
        refused = self._scheduler.take_refused()
        batch = self._scheduler.schedule(now)
        work = StepWork.of(batch.chunks)
        ends_at = now + self._step_s(work) if batch.chunks else now
        return TimedStep(now, ends_at, work, batch, refused, self.profile.num_layers)

    def _step_s(self, work: StepWork) -> float:
        return self.profile.timing.step_s(work, self._kv_capacity) / self._speedup

    def _output(self, step: TimedStep, tokens: list[Token], now: float) -> StepOutput:
        """Of a step that was finished at `now` and brought these tokens."""
        timing = step.work.timing(now - step.started_at, ended_at=now) if step.batch.chunks else None
        return StepOutput([*step.refused, *tokens], self._pool.take_events(), self.load(), timing)


def num_kv_blocks(config: EngineConfig, profile: Profile) -> int:
    """As configured, or as many as the profile's memory holds. Raises ConfigError for none."""
    wanted = config.kv_blocks
    num_blocks = wanted if wanted is not None else profile.kv_capacity // config.block_size
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache would have {num_blocks} blocks: raise kv_blocks or the profile's kv_capacity"
        )
    return num_blocks
