"""The simulated engine without a clock: it says how long its next step takes, and is told when that has passed.

In virtual time, while `has_work()`: `step = plan_step(now)`; for each layer, at `step.layer_at(layer)`,
`write_layer(step, layer)`; at `step.ends_at`, `finish_step(step, now)`. As during any engine's step, nothing else may
be called until it is finished: keep what comes meanwhile.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dynrt.engines.config import EngineConfig
from dynrt.engines.protocol import EngineInfo, EngineRequest, Reservation, StepOutput, Token
from dynrt.engines.scheduling.batch import SampleSpec
from dynrt.engines.scheduling.block_pool import BlockPool
from dynrt.engines.scheduling.limits import limits_of
from dynrt.engines.scheduling.scheduler import Batch, Scheduler
from dynrt.engines.scheduling.sequence import RequestId, Sequence
from dynrt.engines.scheduling.work import StepWork
from dynrt.engines.sim.contents import Contents
from dynrt.engines.sim.fingerprint import choose_token
from dynrt.engines.sim.kv_store import KvStore, Slots
from dynrt.engines.sim.profile import Profile, find_profile
from dynrt.engines.sim.text_limits import TextLimits
from dynrt.planner.events import BlocksStored
from dynrt.runtime.errors import ConfigError
from dynrt.runtime.messages import EngineLoad
from dynrt.transfer.layout import KvGeometry, KvRegion
from dynrt.transfer.local import BlocksReady

_WRITTEN_AT = 0.1  # share of a layer after which its KV is there: norm, QKV projection and rotary embedding


class SimStep(msgspec.Struct, frozen=True):
    """One step under way. Times are on the clock of `plan_step`'s argument."""

    started_at: float
    ends_at: float
    work: StepWork
    batch: Batch
    slots: Slots  # what it writes, in every layer
    faults: dict[RequestId, str]  # requests whose KV is not what it must be
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


class SimCore:
    """See the module. Requests are handled as in engines.protocol.Engine. Raises ConfigError or ModelLoadError."""

    def __init__(self, config: EngineConfig, profile: Profile | None = None) -> None:
        """`profile` instead of the one that `config` names."""
        self.profile = profile if profile is not None else find_profile(config.sim.profile)
        self._speedup = config.sim.speedup
        geometry = _geometry(config, self.profile)
        text_limits = TextLimits.from_dir(Path(config.model_dir))
        self._info = EngineInfo(
            kind="sim",
            context_length=text_limits.context_length,
            vocab_size=text_limits.vocab_size,
            eos_token_ids=text_limits.eos_token_ids,
            geometry=[geometry],
        )
        self.kv = KvStore(geometry.num_layers, geometry.num_blocks, geometry.block_size)
        self._kv_capacity = geometry.num_blocks * geometry.block_size
        self._contents = Contents(geometry.block_size)
        self._pool = BlockPool(geometry.num_blocks, geometry.block_size)
        self._scheduler = Scheduler(limits_of(config, self._info), self._pool)

    @property
    def info(self) -> EngineInfo:
        return self._info

    def kv_regions(self) -> list[list[KvRegion]]:
        return [self.kv.regions()]

    # --- requests -------------------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        self._scheduler.submit(request)

    def cancel(self, key: bytes, epoch: int) -> None:
        self._contents.forget((key, epoch))
        self._scheduler.cancel(key, epoch)

    def reserve(self, request: EngineRequest) -> Reservation | None:
        return self._scheduler.reserve(request)

    def commit(self, key: bytes, epoch: int, first_token: int) -> None:
        self._scheduler.commit(key, epoch, first_token)

    def release(self, key: bytes, epoch: int) -> None:
        self._scheduler.release(key, epoch)

    def has_work(self) -> bool:
        return self._scheduler.has_work() or self._pool.has_events()

    def load(self) -> EngineLoad:
        return self._scheduler.load()

    def cache_snapshot(self) -> list[BlocksStored]:
        return self._pool.snapshot()

    # --- steps ----------------------------------------------------------------------------------------

    def plan_step(self, now: float) -> SimStep:
        """Begin a step at `now`; one without anything to compute ends at once."""
        refused = self._scheduler.take_refused()
        batch = self._scheduler.schedule()
        faults = self._find_faults(batch)
        work = StepWork.of(batch.chunks)
        step_s = self.profile.timing.step_s(work, self._kv_capacity) if batch.chunks else 0.0
        ends_at = now + step_s / self._speedup
        slots = self._contents.written_by(batch)
        return SimStep(now, ends_at, work, batch, slots, faults, refused, self.profile.num_layers)

    def write_layer(self, step: SimStep, layer: int) -> None:
        """This layer's KV is computed."""
        self.kv.write(step.slots, layer, layer + 1)

    def write_all_layers(self, step: SimStep) -> None:
        """For steps without a handoff, of which nobody sees the layers come one by one."""
        self.kv.write(step.slots, 0, self.profile.num_layers)

    def finish_step(self, step: SimStep, now: float) -> StepOutput:
        """All layers are written; `now` is `step.ends_at`, or later if time is not exact."""
        tokens = [*step.refused, *self._fail(step), *self._advance(step)]
        timing = step.work.timing(now - step.started_at, ended_at=now) if step.batch.chunks else None
        return StepOutput(tokens, self._pool.take_events(), self.load(), timing)

    def _find_faults(self, batch: Batch) -> dict[RequestId, str]:
        """Look at what this step reads for the first time, and at a sample of the rest."""
        slots, owners = self._contents.read_by(batch)
        faults: dict[RequestId, str] = {}
        for wrong in self.kv.find_wrong(slots):
            block_id, position = slots.block_ids[wrong.index], slots.positions[wrong.index]
            error = f"KV block {block_id} holds other tokens' KV: layer {wrong.layer}, position {position}"
            faults.setdefault(owners[wrong.index], error)
        return faults

    def _fail(self, step: SimStep) -> list[Token]:
        tokens: list[Token] = []
        for sequence in step.batch.sequences:
            if sequence.id in step.faults:
                self._contents.forget(sequence.id)
                tokens += self._scheduler.fail(Batch(sequences=[sequence]), step.faults[sequence.id])
        return tokens

    def _advance(self, step: SimStep) -> list[Token]:
        pairs = zip(step.batch.sequences, step.batch.chunks, strict=True)
        sound = [(sequence, chunk) for sequence, chunk in pairs if sequence.id not in step.faults]
        sampled = [
            self._sample(sequence, chunk.sample) for sequence, chunk in sound if chunk.sample is not None
        ]
        batch = Batch([chunk for _, chunk in sound], [sequence for sequence, _ in sound])
        tokens = self._scheduler.advance(batch, sampled)
        self._forget_ended(batch, tokens)
        return tokens

    def _sample(self, sequence: Sequence, spec: SampleSpec) -> int:
        """Never an end of sequence: how long answers are is for `max_tokens` and stop conditions to say."""
        banned_ids = self._info.eos_token_ids.union(spec.banned_ids)
        return choose_token(self._contents.fingerprint_of(sequence), self._info.vocab_size, banned_ids)

    def _forget_ended(self, batch: Batch, tokens: list[Token]) -> None:
        finished = {(token.key, token.epoch) for token in tokens if token.finish_reason is not None}
        for sequence, chunk in zip(batch.sequences, batch.chunks, strict=True):
            is_prefilled = sequence.request.prefill_only and chunk.sample is not None
            if is_prefilled or sequence.id in finished:
                self._contents.forget(sequence.id)


def _geometry(config: EngineConfig, profile: Profile) -> KvGeometry:
    """As KvStore is laid out."""
    num_blocks = (
        config.kv_blocks if config.kv_blocks is not None else profile.kv_capacity // config.block_size
    )
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache would have {num_blocks} blocks: raise kv_blocks or the profile's kv_capacity"
        )
    return KvGeometry(
        num_layers=profile.num_layers,
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_kv_heads=1,
        head_size=1,
        dtype="float32",
    )
