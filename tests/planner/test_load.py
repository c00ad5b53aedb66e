"""A worker's load: idempotent, never negative, exactly zero when idle."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dynrt.planner.load import Load
from dynrt.runtime.messages import EngineLoad, StepTiming

KEYS = [bytes([number]) for number in range(4)]
keys = st.sampled_from(KEYS)
ZERO = (0, 0, 0, 0, 0, 0)


def numbers(load: Load) -> tuple[int, ...]:
    return (
        load.prefill_requests,
        load.prefill_tokens,
        load.prefill_context,
        load.decode_requests,
        load.decode_kv_tokens,
        load.held_tokens,
    )


def step(prefill_tokens: int, decode_kv_tokens: int) -> StepTiming:
    return StepTiming(0.01, 0.0, prefill_tokens, prefill_tokens**2, 1, decode_kv_tokens)


def test_a_prefill_weighs_only_its_uncached_tokens() -> None:
    load = Load(16)
    load.plan_prefill(b"a", prompt_tokens=100, uncached_tokens=30)
    assert (load.prefill_tokens, load.prefill_context) == (30, 100**2 - 70**2)


def test_steps_work_off_the_oldest_prefill_first() -> None:
    load = Load(16)
    load.plan_prefill(b"a", 100, 100)
    load.plan_prefill(b"b", 50, 50)
    load.step(EngineLoad(), step(prefill_tokens=120, decode_kv_tokens=0))
    assert load.prefill_tokens == 30
    assert load.prefill_context == 50**2 - 20**2
    load.end_prefill(b"a")
    assert load.prefill_tokens == 30


def test_a_worker_that_reports_more_is_believed() -> None:
    load = Load(16)
    load.plan_prefill(b"a", 100, 10)
    load.plan_decode(b"a", 100, 10)
    load.step(EngineLoad(blocks_active=50), step(prefill_tokens=0, decode_kv_tokens=700))
    assert (load.prefill_tokens, load.held_tokens, load.decode_kv_tokens) == (10, 800, 700)


def test_a_report_that_is_late_does_not_outlive_the_last_request() -> None:
    load = Load(16)
    load.plan_prefill(b"a", 100, 100)
    load.plan_decode(b"a", 100, 100)
    load.end(b"a")
    load.step(EngineLoad(blocks_active=50), step(prefill_tokens=10, decode_kv_tokens=700))
    assert numbers(load) == ZERO


class LoadMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.load = Load(16)
        self.prefilling: set[bytes] = set()
        self.decoding: set[bytes] = set()

    @rule(key=keys, prompt=st.integers(1, 500), cached=st.integers(0, 500))
    def prefill_planned(self, key: bytes, prompt: int, cached: int) -> None:
        self.load.plan_prefill(key, prompt, max(0, prompt - cached))
        self.prefilling.add(key)

    @rule(key=keys, prompt=st.integers(1, 500), cached=st.integers(0, 500))
    def decode_planned(self, key: bytes, prompt: int, cached: int) -> None:
        self.load.plan_decode(key, prompt, max(0, prompt - cached))
        self.decoding.add(key)

    @rule(key=keys)
    def first_token(self, key: bytes) -> None:
        self.load.end_prefill(key)
        self.prefilling.discard(key)

    @rule(key=keys)
    def ended(self, key: bytes) -> None:
        self.load.end(key)
        self.prefilling.discard(key)
        self.decoding.discard(key)

    @rule(
        active=st.integers(0, 100), prefill_tokens=st.integers(0, 2000), decode_kv_tokens=st.integers(0, 2000)
    )
    def stepped(self, active: int, prefill_tokens: int, decode_kv_tokens: int) -> None:
        self.load.step(EngineLoad(blocks_active=active), step(prefill_tokens, decode_kv_tokens))

    @rule(active=st.integers(0, 100))
    def reported(self, active: int) -> None:
        self.load.step(EngineLoad(blocks_active=active), None)

    @invariant()
    def never_negative_and_zero_when_idle(self) -> None:
        assert min(numbers(self.load)) >= 0
        assert self.load.prefill_requests == len(self.prefilling)
        assert self.load.decode_requests == len(self.decoding)
        if not self.prefilling and not self.decoding:
            assert numbers(self.load) == ZERO

    def teardown(self) -> None:
        for key in KEYS:
            self.ended(key)
        assert numbers(self.load) == ZERO


TestLoadModel = LoadMachine.TestCase
TestLoadModel.settings = settings(max_examples=60, stateful_step_count=30)
