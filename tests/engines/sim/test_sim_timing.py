"""Models of time: the published formulas, evaluated by hand."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from virtual_engine import PROFILE

from dynrt.engines.config import SimConfig
from dynrt.engines.scheduling.batch import Chunk
from dynrt.engines.scheduling.work import StepWork
from dynrt.engines.sim.link import Link, LinkQueue
from dynrt.engines.sim.profile import GPUS, MODELS, Profile, find_profile
from dynrt.engines.sim.timing import DynamoMocker, Linear
from dynrt.runtime.errors import ConfigError


def prefill(num_tokens: int, start: int = 0) -> StepWork:
    return StepWork.of([Chunk([1] * num_tokens, start, [], None)])


def decodes(count: int, context: int) -> StepWork:
    return StepWork.of([Chunk([1], context - 1, [], None)] * count)


def step_ms(profile: Profile, work: StepWork) -> float:
    return 1e3 * profile.timing.step_s(work, profile.kv_capacity)


@pytest.mark.parametrize(
    ("name", "count", "context", "expected_ms"),
    [  # (weights + count · context · KV bytes a token) / (0.8 · bandwidth)
        ("llama-3.1-8b@a100", 1, 1024, 9.9),
        ("llama-3.1-8b@h100", 1, 1024, 6.0),
        ("llama-3.1-8b@h100", 32, 4096, 12.4),
        ("llama-3.1-8b@h200", 128, 4096, 22.1),
        ("qwen3-32b@h200", 32, 4096, 26.2),
        ("qwen2.5-7b@h100", 32, 4096, 8.5),
    ],
)
def test_decodes_take_what_weights_and_kv_take_to_read(
    name: str, count: int, context: int, expected_ms: float
) -> None:
    assert step_ms(find_profile(name), decodes(count, context)) == pytest.approx(expected_ms, rel=0.01)


def test_prefill_takes_what_its_arithmetic_takes() -> None:
    """2 · 8.03e9 · 4096 for the weights and 4 · 32 · 4096 · 4096² / 2 for attention, at half of 989 TFLOP/s."""
    profile = find_profile("llama-3.1-8b@h100")
    assert step_ms(profile, prefill(4096)) == pytest.approx(1e3 * (6.578e13 + 4.398e12) / 494.5e12, rel=1e-3)


def test_chunks_of_a_prompt_take_as_long_as_the_whole() -> None:
    profile = find_profile("qwen3-8b@a100")
    chunks = [prefill(1024, start) for start in range(0, 4096, 1024)]
    assert sum(step_ms(profile, chunk) for chunk in chunks) == pytest.approx(step_ms(profile, prefill(4096)))


def test_a_short_prompt_takes_as_long_as_reading_the_weights() -> None:
    profile = find_profile("llama-3.1-8b@h100")
    assert step_ms(profile, prefill(2)) == step_ms(profile, prefill(100)) < step_ms(profile, prefill(1000))


def test_kv_capacity_is_what_the_weights_leave() -> None:
    profile = find_profile("llama-3.1-8b@h100")
    assert profile.kv_bytes_per_token == 128 << 10
    assert profile.kv_capacity == (72_000_000_000 - 16_060_000_000) // (128 << 10)
    assert profile.kv_bytes(32) == 32 * (4 << 10)  # of one layer


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpu", GPUS)
def test_every_model_fits_every_gpu(model: str, gpu: str) -> None:
    assert find_profile(f"{model}@{gpu}").kv_capacity > 10_000


def test_dynamo_mocker() -> None:
    timing = DynamoMocker()
    assert timing.step_s(prefill(1000), 10_000) == pytest.approx(32.1e-3, rel=0.01)
    assert timing.step_s(prefill(8192), 10_000) == pytest.approx(169.1e-3, rel=0.01)
    assert timing.step_s(decodes(10, 1000), 10_000) == pytest.approx(34.01e-3)
    assert timing.step_s(decodes(1, 10), 1_000_000) == pytest.approx(5.74e-3, rel=0.01)


def test_linear_counts_every_quantity() -> None:
    timing = Linear(
        step_ms=1.0,
        prefill_token_ms=0.1,
        prefill_context_ms=0.01,
        decode_request_ms=2.0,
        decode_kv_token_ms=0.001,
    )
    work = StepWork.of([Chunk([1] * 10, 10, [], None), Chunk([1], 99, [], None), Chunk([1], 899, [], None)])
    assert timing.step_s(work, 1) == pytest.approx(1e-3 * (1 + 0.1 * 10 + 0.01 * 300 + 2 * 2 + 0.001 * 1000))


def test_a_profile_comes_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_bytes(msgspec.json.encode(PROFILE))
    assert find_profile(str(path)) == PROFILE
    path.write_text('{"timing": {"type": "linear"}}')
    with pytest.raises(ConfigError, match=r"profile\.json.*step_ms"):
        find_profile(str(path))


def test_an_unknown_profile_is_told_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"'llama-3\.1-8b@b200'.*qwen3-8b.*h100.*JSON file"):
        find_profile("llama-3.1-8b@b200")


@pytest.mark.parametrize("speedup", [0.0, -1.0, float("nan"), float("inf")])
def test_time_must_pass(speedup: float) -> None:
    with pytest.raises(ConfigError, match="--speedup"):
        SimConfig(speedup=speedup)


def test_a_link_carries_one_thing_after_the_other() -> None:
    link = LinkQueue(Link(bytes_per_s=1000.0, send_s=0.5))
    assert link.send(10.0, 1000) == 11.5
    assert link.send(10.0, 0) == 12.0
    assert link.send(20.0, 500) == 21.0
    assert LinkQueue(Link(bytes_per_s=1000.0, send_s=0.5), speedup=2.0).send(10.0, 1000) == 10.75
