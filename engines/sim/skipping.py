"""A simulated engine that skips what changes nothing: decode steps alike but for a token more (sans-IO).

Its blocks hold nothing and its tokens mean nothing: it is for asking what happens when, many times faster than time.
A stretch of skipped steps is one StepOutput, whose timing is that of its last step.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate
from pathlib import Path

import msgspec

from dynrt.engines.config import EngineConfig
from dynrt.engines.protocol import EngineInfo, StepOutput
from dynrt.engines.scheduling.work import StepWork
from dynrt.engines.sim.profile import Profile, find_profile
from dynrt.engines.sim.text_limits import TextLimits
from dynrt.engines.sim.timed import TimedCore, TimedStep, num_kv_blocks
from dynrt.transfer.layout import DTYPE_BYTES, KvGeometry

LONGEST_STRETCH = 128  # steps: news of a worker is never older
TOKEN_ID = 0  # the one that it samples
_DTYPE = "bfloat16"


class Stretch(msgspec.Struct):
    """Uneventful steps under way: when each of them ends, and its work."""

    started_at: float
    ends: list[float]
    works: list[StepWork]

    @property
    def ends_at(self) -> float:
        return self.ends[-1]

    def cut(self, now: float) -> None:
        """Something came up: the step that runs at `now` is the last one."""
        del self.ends[bisect_left(self.ends, now) + 1 :]


class SkippingCore(TimedCore):
    """As TimedCore; between steps also `plan_stretch`. `longest_stretch` 0: skip nothing. Raises ConfigError."""

    def __init__(
        self, config: EngineConfig, profile: Profile | None = None, longest_stretch: int = LONGEST_STRETCH
    ) -> None:
        """`profile` instead of the one that `config` names."""
        profile = profile if profile is not None else find_profile(config.sim.profile)
        text_limits = TextLimits.from_dir(Path(config.model_dir))
        super().__init__(config, _info(config, profile, text_limits), profile, checks_ids=False)
        self._longest_stretch = longest_stretch

    def plan_stretch(self, now: float) -> Stretch | None:
        """Begin as many uneventful steps as there are; None: what comes now is a step by itself."""
        count = min(self._scheduler.count_uneventful(), self._longest_stretch) if self._longest_stretch else 0
        if not count:
            return None
        requests, kv_tokens = self._scheduler.decode_work()
        last_kv_tokens = kv_tokens + count * requests
        works = [StepWork(0, 0, requests, tokens) for tokens in range(kv_tokens, last_kv_tokens, requests)]
        _, *ends = accumulate(map(self._step_s, works), initial=now)
        return Stretch(now, ends, works)

    def finish_stretch(self, stretch: Stretch) -> StepOutput:
        """All its steps, as many as it was not cut off from, have ended."""
        count = len(stretch.ends)
        self._scheduler.skip(count, TOKEN_ID)
        last_began = stretch.ends[-2] if count > 1 else stretch.started_at
        timing = stretch.works[count - 1].timing(stretch.ends_at - last_began, ended_at=stretch.ends_at)
        return StepOutput([], self._pool.take_events(), self.load(), timing)

    def finish_step(self, step: TimedStep, now: float) -> StepOutput:
        num_sampled = sum(chunk.sample is not None for chunk in step.batch.chunks)
        return self._output(step, self._scheduler.advance(step.batch, [TOKEN_ID] * num_sampled), now)


def _info(config: EngineConfig, profile: Profile, text_limits: TextLimits) -> EngineInfo:
    """With the KV cache's real size, which the planner goes by."""
    values_per_token = profile.kv_bytes_per_token / profile.num_layers / 2 / DTYPE_BYTES[_DTYPE]
    geometry = KvGeometry(
        num_layers=profile.num_layers,
        num_blocks=num_kv_blocks(config, profile),
        block_size=config.block_size,
        num_kv_heads=1,
        head_size=max(1, round(values_per_token)),
        dtype=_DTYPE,
    )
    return EngineInfo(
        kind="sim",
        context_length=text_limits.context_length,
        vocab_size=text_limits.vocab_size,
        eos_token_ids=text_limits.eos_token_ids,
        geometry=[geometry],
    )
