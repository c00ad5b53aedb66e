"""SimCore on a clock of the test's: time, tokens, handoffs, and wrong KV that is seen."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from virtual_engine import (
    BLOCK_SIZE,
    EOS,
    PROFILE,
    VOCAB,
    VirtualEngine,
    expected_outputs,
    make_request,
    outputs,
    sim_config,
)

from dynrt.engines.protocol import EngineRequest
from dynrt.engines.sim.core import SimCore, SimStep
from dynrt.runtime.errors import ConfigError, ModelLoadError
from dynrt.runtime.messages import TokenLogprob

MakeEngine = Callable[..., VirtualEngine]
PROMPT = [10 + (7 * i * i) % 280 for i in range(23)]


def damage(engine: VirtualEngine, block_id: int, layer: int, offset: int) -> None:
    """As a write meant for another block would."""
    region = engine.core.kv_memory()[0][layer]
    block_bytes = engine.core.info.geometry[0].layer_block_bytes
    word = ctypes.c_uint32.from_address(region.address + block_id * block_bytes + 4 * offset)
    word.value ^= 0x5A5A5A5A


# --- tokens ---------------------------------------------------------------------------------------


def test_tokens_are_a_function_of_all_tokens_before(make_engine: MakeEngine) -> None:
    engine, request = make_engine(), make_request(1, PROMPT, 20)
    engine.core.submit(request)
    tokens = engine.run()
    assert outputs(tokens, request) == expected_outputs(PROMPT, 20)
    assert tokens[-1].finish_reason == "length"
    assert len(set(outputs(tokens, request))) > 10
    assert expected_outputs([*PROMPT[:5], 11, *PROMPT[6:]], 20) != expected_outputs(PROMPT, 20)


def test_no_end_of_sequence_though_it_would_end_the_request(make_engine: MakeEngine) -> None:
    engine = make_engine()
    requests = [make_request(number, [number], 100, ignore_eos=False) for number in range(8)]
    for request in requests:
        engine.core.submit(request)
    tokens = engine.run()
    assert [len(outputs(tokens, request)) for request in requests] == [100] * 8
    sampled = {token.token_id for token in tokens}
    assert not sampled & EOS
    assert max(sampled) < VOCAB and len(sampled) > VOCAB // 2


def test_a_stop_token_ends_a_request_but_not_before_min_tokens(make_engine: MakeEngine) -> None:
    third = expected_outputs(PROMPT, 3)[2]
    for min_tokens, stops in ((0, True), (3, False)):
        engine = make_engine()
        request = make_request(1, PROMPT, 6, stop_token_ids=(third,), min_tokens=min_tokens)
        engine.core.submit(request)
        tokens = engine.run()
        assert (len(tokens) == 3 and tokens[-1].stop_reason == third) is stops
        assert third not in outputs(tokens, request)[: min_tokens or 2]


def test_every_token_is_certain(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.core.submit(make_request(1, PROMPT, 3, logprobs=2, prompt_logprobs=0))
    engine.core.submit(make_request(2, PROMPT, 3))
    tokens = engine.run()
    asked = [token for token in tokens if token.key == tokens[0].key]
    assert [token.logprob for token in asked] == [
        TokenLogprob(token.token_id, 0.0, [(token.token_id, 0.0)]) for token in asked
    ]
    scores = [None, *(TokenLogprob(token_id, 0.0) for token_id in PROMPT[1:])]
    assert [token.prompt_logprobs for token in asked] == [scores, None, None]
    others = [token for token in tokens if token not in asked]
    assert len(others) == 3
    assert all(token.logprob is None and token.prompt_logprobs is None for token in others)


def test_a_continuation_goes_on_as_if_nothing_had_happened(make_engine: MakeEngine) -> None:
    whole = expected_outputs(PROMPT, 12)
    engine, request = make_engine(), make_request(1, PROMPT, 12, output_ids=whole[:7])
    engine.core.submit(request)
    assert outputs(engine.run(), request) == whole[7:]


# --- time -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("speedup", [1.0, 8.0])
def test_steps_take_what_the_profile_says(make_engine: MakeEngine, speedup: float) -> None:
    engine = make_engine(speedup=speedup)
    engine.core.submit(make_request(1, PROMPT, 2))
    durations_ms, timings = [], []
    while engine.core.has_work():
        began = engine.now
        timing = engine.step().timing
        assert timing is not None and timing.ended_at == engine.now
        assert timing.duration_s == pytest.approx(engine.now - began)
        durations_ms.append(1e3 * timing.duration_s * speedup)
        timings.append(timing)
    assert durations_ms == pytest.approx([5 + 1.6, 5 + 0.7, 5 + 0.5 + 0.024], abs=1e-6)
    assert [timing.prefill_tokens for timing in timings] == [16, 7, 0]
    assert timings[-1].decode_kv_tokens == 24


def test_layers_come_evenly_within_the_step(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.core.submit(make_request(1, PROMPT[:16], 2, prefill_only=True))
    step = engine.core.plan_step(50.0)
    assert step.ends_at == pytest.approx(50.0 + 6.6e-3)
    gaps = [step.layer_at(layer + 1) - step.layer_at(layer) for layer in range(2)]
    assert gaps == pytest.approx([2.2e-3, 2.2e-3])
    assert step.started_at < step.layer_at(0) and step.layer_at(2) < step.ends_at


def test_a_step_without_anything_to_compute_takes_no_time(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.core.submit(make_request(1, [VOCAB], 2))
    output = engine.step()
    assert engine.now == 100.0 and output.timing is None
    assert [token.finish_reason for token in output.tokens] == ["error"]


# --- handoffs -------------------------------------------------------------------------------------


def hand_off(
    prefill: VirtualEngine, decode: VirtualEngine, number: int, prompt_ids: list[int]
) -> EngineRequest:
    """A request whose prompt is computed on one engine, up to the commit on the other."""
    request = make_request(number, prompt_ids, 12)
    reservation = decode.core.reserve(request)
    assert reservation is not None
    prefill.core.submit(msgspec.structs.replace(request, prefill_only=True))
    [first] = prefill.run()
    assert first.token_id == expected_outputs(prompt_ids, 1)[0]
    prefill.push(request, decode, reservation)
    prefill.core.release(request.key, 0)
    decode.core.commit(request.key, 0, first.token_id)
    return request


def test_decode_goes_on_with_what_prefill_has_written(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine(), make_engine()
    for number, prompt_ids in enumerate([PROMPT, PROMPT[:20] + [9] * 6, PROMPT]):  # with hits on either side
        request = hand_off(prefill, decode, number, prompt_ids)
        assert outputs(decode.run(), request) == expected_outputs(prompt_ids, 12)[1:]
    assert prefill.core.load().blocks_active == decode.core.load().blocks_active == 0


def test_a_block_that_was_not_pushed_is_seen(make_engine: MakeEngine) -> None:
    prefill, decode = make_engine(), make_engine()
    request = make_request(1, PROMPT, 12)
    reservation = decode.core.reserve(request)
    assert reservation is not None
    prefill.core.submit(msgspec.structs.replace(request, prefill_only=True))
    [first] = prefill.run()
    wanted, missing = reservation.block_ids, reservation.block_ids[3]
    prefill.push(request, decode, reservation)
    decode.core.kv.copy_blocks(decode.core.kv, 1, [wanted[2]], [missing])  # layer 1 of another block instead
    decode.core.commit(request.key, 0, first.token_id)
    [token] = decode.run()
    assert token.error == f"KV block {missing} holds other tokens' KV: layer 1, position {3 * BLOCK_SIZE}"
    assert (token.token_id, token.finish_reason) == (-1, "error")
    assert decode.core.load().blocks_active == 0


# --- wrong KV -------------------------------------------------------------------------------------


def test_a_damaged_prefix_hit_is_seen(make_engine: MakeEngine) -> None:
    engine, tables = make_engine(), []
    engine.core.submit(make_request(1, PROMPT, 8))
    engine.step(lambda step: tables.append(step.batch.chunks[0].block_ids))
    engine.run()
    damaged = tables[0][2]
    damage(engine, damaged, layer=2, offset=1)
    engine.core.submit(make_request(2, PROMPT, 8))
    [token] = engine.run()
    position = 2 * BLOCK_SIZE + 1
    assert token.error == f"KV block {damaged} holds other tokens' KV: layer 2, position {position}"


def test_damage_ends_its_request_only(make_engine: MakeEngine) -> None:
    engine = make_engine()
    bystander, request = make_request(1, PROMPT[::-1], 12), make_request(2, PROMPT, 12)
    engine.core.submit(bystander)
    tokens = engine.step().tokens
    assert engine.core.reserve(request) is not None
    engine.core.commit(request.key, 0, first_token=7)  # nothing was pushed
    tokens += engine.run()
    assert [token.finish_reason for token in tokens if token.key == request.key] == ["error"]
    assert outputs(tokens, bystander) == expected_outputs(PROMPT[::-1], 12)
    assert engine.core.load().blocks_active == 0


def test_a_write_that_comes_late_into_a_running_request_is_seen(make_engine: MakeEngine) -> None:
    """Decodes look at one earlier token a step, so all of a request's blocks are looked at again and again."""
    engine = make_engine()
    engine.core.submit(make_request(1, PROMPT, 60))
    engine.step()
    engine.step()

    def damage_second_block(step: SimStep) -> None:
        for offset in range(BLOCK_SIZE):
            damage(engine, step.batch.chunks[0].block_ids[1], layer=0, offset=offset)

    tokens = engine.step(damage_second_block).tokens
    assert [token.error for token in tokens] == [None]
    assert "layer 0" in (engine.run()[-1].error or "")


def test_a_prompt_of_another_salt_has_other_kv(make_engine: MakeEngine) -> None:
    """Tokens do not depend on it, KV does: one tenant's blocks would be seen in another's request."""
    prefill, decode = make_engine(), make_engine()
    ours, theirs = make_request(1, PROMPT, 12, salt="us"), make_request(1, PROMPT, 12, salt="them")
    reservation = decode.core.reserve(theirs)
    assert reservation is not None
    prefill.core.submit(msgspec.structs.replace(ours, prefill_only=True))
    [first] = prefill.run()
    prefill.push(ours, decode, reservation)
    decode.core.commit(theirs.key, 0, first.token_id)
    assert "position 0" in (decode.run()[0].error or "")


# --- setting up -----------------------------------------------------------------------------------


def test_the_cache_is_as_large_as_the_profile_or_the_configuration_says(config_dir: Path) -> None:
    assert SimCore(sim_config(config_dir), PROFILE).info.geometry[0].num_blocks == 40
    assert SimCore(sim_config(config_dir, kv_blocks=7), PROFILE).info.geometry[0].num_blocks == 7
    with pytest.raises(ConfigError, match="0 blocks: raise kv_blocks"):
        SimCore(sim_config(config_dir, kv_blocks=0), PROFILE)


def test_a_model_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        SimCore(sim_config(tmp_path), PROFILE)
    (tmp_path / "config.json").write_text('{"vocab_size": 0}')
    with pytest.raises(ModelLoadError, match=r"vocab_size"):
        SimCore(sim_config(tmp_path), PROFILE)


def test_generation_config_decides_what_ends_a_sequence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"vocab_size": 9, "max_position_embeddings": 9, "eos_token_id": 1}'
    )
    assert SimCore(sim_config(tmp_path), PROFILE).info.eos_token_ids == {1}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 4]}')
    assert SimCore(sim_config(tmp_path), PROFILE).info.eos_token_ids == {2, 4}


RUN_WITHOUT_TORCH = """
import sys
from dynrt.engines.process import open_engine  # with all that an engine process imports
from dynrt.engines.config import EngineConfig, SimConfig
from dynrt.engines.protocol import EngineRequest
from dynrt.runtime.messages import SamplingParams
engine = open_engine(EngineConfig(sys.argv[1], "tiny", kind="sim", kv_blocks=20, sim=SimConfig(speedup=1e6)))
engine.submit(EngineRequest(b"k", 0, [5, 6, 7], SamplingParams(max_tokens=3)))
while engine.has_work():
    engine.step(hook=None)
assert engine.load().blocks_active == 0
print(sorted({"torch", "vllm"} & set(sys.modules)))
"""


def test_torch_is_never_imported(config_dir: Path) -> None:
    command = [sys.executable, "-c", RUN_WITHOUT_TORCH, str(config_dir)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.stdout, ran.stderr) == ("[]\n", "")
