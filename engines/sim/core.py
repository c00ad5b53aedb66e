"""The simulated engine without a clock: it says how long its next step takes, and is told when that has passed.

In virtual time, while `has_work()`: `step = plan_step(now)`; for each layer, at `step.layer_at(layer)`,
`write_layer(step, layer)`; at `step.ends_at`, `finish_step(step, now)`. As during any engine's step, nothing else may
be called until it is finished: keep what comes meanwhile.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from dynrt.engines.config import EngineConfig
from dynrt.engines.protocol import EngineInfo, StepOutput, Token
from dynrt.engines.scheduling.batch import SampleSpec
from dynrt.engines.scheduling.scheduler import Batch
from dynrt.engines.scheduling.sequence import RequestId, Sequence
from dynrt.engines.sim.certainty import certain, score_prompt
from dynrt.engines.sim.contents import Contents
from dynrt.engines.sim.fingerprint import choose_token
from dynrt.engines.sim.kv_store import KvStore, Slots
from dynrt.engines.sim.profile import Profile, find_profile
from dynrt.engines.sim.text_limits import TextLimits
from dynrt.engines.sim.timed import TimedCore, TimedStep, num_kv_blocks
from dynrt.transfer.layout import KvGeometry, KvRegion


class SimStep(TimedStep, frozen=True):
    """A step, and what it does to the KV cache."""

    slots: Slots  # what it writes, in every layer
    faults: dict[RequestId, str]  # requests whose KV is not what it must be


class SimCore(TimedCore):
    """See the module. Requests are handled as in engines.protocol.Engine. Raises ConfigError or ModelLoadError."""

    def __init__(self, config: EngineConfig, profile: Profile | None = None) -> None:
        """`profile` instead of the one that `config` names."""
        profile = profile if profile is not None else find_profile(config.sim.profile)
        geometry = _geometry(config, profile)
        text_limits = TextLimits.from_dir(Path(config.model_dir))
        info = EngineInfo(
            kind="sim",
            context_length=text_limits.context_length,
            vocab_size=text_limits.vocab_size,
            eos_token_ids=text_limits.eos_token_ids,
            geometry=[geometry],
        )
        super().__init__(config, info, profile)
        self.kv = KvStore(geometry.num_layers, geometry.num_blocks, geometry.block_size)
        self._contents = Contents(geometry.block_size)

    def kv_memory(self) -> list[list[KvRegion]]:
        return [self.kv.regions()]

    def cancel(self, key: bytes, epoch: int) -> None:
        self._contents.forget((key, epoch))
        super().cancel(key, epoch)

    # --- steps ----------------------------------------------------------------------------------------

    def plan_step(self, now: float) -> SimStep:
        """Begin a step at `now`; one without anything to compute ends at once."""
        step = super().plan_step(now)
        faults = self._find_faults(step.batch)
        slots = self._contents.written_by(step.batch)
        return SimStep(**msgspec.structs.asdict(step), slots=slots, faults=faults)

    def write_layer(self, step: SimStep, layer: int) -> None:
        """This layer's KV is computed."""
        self.kv.write(step.slots, layer, layer + 1)

    def write_all_layers(self, step: SimStep) -> None:
        """For steps without a handoff, of which nobody sees the layers come one by one."""
        self.kv.write(step.slots, 0, self.profile.num_layers)

    def finish_step(self, step: SimStep, now: float) -> StepOutput:
        """All layers are written; `now` is `step.ends_at`, or later if time is not exact."""
        return self._output(step, [*self._fail(step), *self._advance(step)], now)

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
        specs = [(sequence, chunk.sample) for sequence, chunk in sound if chunk.sample is not None]
        sampled = [self._sample(sequence, spec) for sequence, spec in specs]
        logprobs = [
            certain(token_id, spec.params.logprobs)
            for token_id, (_, spec) in zip(sampled, specs, strict=True)
        ]
        for sequence, chunk in sound:
            score_prompt(sequence, chunk)
        batch = Batch([chunk for _, chunk in sound], [sequence for sequence, _ in sound])
        tokens = self._scheduler.advance(batch, sampled, logprobs)
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
    return KvGeometry(
        num_layers=profile.num_layers,
        num_blocks=num_kv_blocks(config, profile),
        block_size=config.block_size,
        num_kv_heads=1,
        head_size=1,
        dtype="float32",
    )
