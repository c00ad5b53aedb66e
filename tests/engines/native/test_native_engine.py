"""NativeEngine on a tiny model: the same greedy tokens whichever way they are computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from native_rig import PROMPT, MakeEngine, Recorder, hand_off, ids, make_request, outputs, run

from dynrt.engines.config import EngineConfig
from dynrt.engines.native.engine import NativeEngine
from dynrt.planner.events import BlocksStored
from dynrt.runtime.errors import ConfigError


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Path) -> list[int]:
    """PROMPT's greedy continuation, computed in one piece, alone."""
    engine = NativeEngine(EngineConfig(str(tiny_model_dir), "tiny", dtype="float32", device="cpu", threads=1))
    [tokens] = outputs(engine, [PROMPT])
    assert len(tokens) == 24 and len(set(tokens)) > 5
    return tokens


def test_chunked(make_engine: MakeEngine, expected: list[int]) -> None:
    assert outputs(make_engine(max_batch_tokens=11), [PROMPT]) == [expected]


def test_with_a_prefix_hit(make_engine: MakeEngine, expected: list[int]) -> None:
    engine = make_engine()
    outputs(engine, [PROMPT[:50]])
    engine.submit(make_request(7, PROMPT))
    tokens = run(engine)
    assert tokens[0].cached_tokens == 48
    assert ids(tokens) == expected


def test_batched_with_others(make_engine: MakeEngine, expected: list[int]) -> None:
    others = [[20 + number + 3 * i for i in range(5 + 9 * number)] for number in range(4)]
    engine = make_engine(max_batch_tokens=32)
    assert outputs(engine, [*others[:2], PROMPT, *others[2:]])[2] == expected
    assert engine.load().preemptions_total == 0


def test_preempted(make_engine: MakeEngine, expected: list[int]) -> None:
    engine = make_engine(kv_blocks=23)
    assert outputs(engine, [PROMPT[::-1], PROMPT])[1] == expected
    assert engine.load().preemptions_total > 0


def test_seeded_sampling_is_the_same_chunked_and_whole(make_engine: MakeEngine) -> None:
    options = {"temperature": 0.9, "top_p": 0.95, "seed": 5}
    whole = outputs(make_engine(), [PROMPT], **options)
    assert outputs(make_engine(max_batch_tokens=11), [PROMPT], **options) == whole


@pytest.mark.parametrize("num_tokens", [75, 72, 5])
def test_handed_off(make_engine: MakeEngine, num_tokens: int) -> None:
    prefill, decode = make_engine(max_batch_tokens=20), make_engine(kv_blocks=17)
    prompt_ids = PROMPT[:num_tokens]
    [whole] = outputs(make_engine(), [prompt_ids])
    _, tokens = hand_off(prefill, decode, make_request(1, prompt_ids))
    assert ids(tokens) == whole
    reservation, tokens = hand_off(prefill, decode, make_request(2, prompt_ids))
    assert ids(tokens) == whole
    assert reservation.first_block == num_tokens // 8, "the decode end's own hit"
    assert prefill.load().blocks_active == decode.load().blocks_active == 0


def test_layers_are_told_only_while_announced_blocks_grow(make_engine: MakeEngine) -> None:
    engine, hook = make_engine(max_batch_tokens=20), Recorder()
    engine.submit(make_request(1, PROMPT[:40]))
    engine.step(hook)
    assert hook.calls == []
    run(engine)
    engine.submit(make_request(2, PROMPT[:44], prefill_only=True))
    run(engine, hook)
    hit, last = hook.ready
    assert (hit.first_block, len(hit.block_ids), hit.written) == (0, 5, True)
    assert (last.first_block, len(last.block_ids), last.written) == (5, 1, False)
    assert hook.calls == [[hit, last], 0, 1, 2, 3]


def test_a_step_reports_load_timing_and_cache_events(make_engine: MakeEngine) -> None:
    engine = make_engine(max_batch_tokens=30)
    engine.submit(make_request(1, PROMPT[:40]))
    first, second, third = (engine.step(Recorder()) for _ in range(3))
    assert first.timing is not None and second.timing is not None and third.timing is not None
    assert (first.timing.prefill_tokens, first.timing.prefill_context) == (30, 900)
    assert (second.timing.prefill_tokens, second.timing.prefill_context) == (10, 700)
    assert (third.timing.decode_requests, third.timing.decode_kv_tokens) == (1, 41)
    assert third.timing.duration_s > 0
    [event] = first.cache_events
    assert isinstance(event, BlocksStored) and len(event.keys) == 3
    assert (first.load.running_requests, first.load.waiting_requests) == (1, 0)
    assert engine.cache_snapshot()[0].keys == [1, 2, 3, 4, 5]


def test_a_step_with_nothing_to_do_is_empty(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert not engine.has_work()
    output = engine.step(Recorder())
    assert (output.tokens, output.cache_events, output.timing) == ([], [], None)


def test_evictions_for_a_reservation_are_told_at_once(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_blocks=8)
    outputs(engine, [PROMPT[:40]])
    assert not engine.has_work()
    assert engine.reserve(make_request(1, PROMPT[10:60], max_tokens=2)) is not None
    assert engine.has_work()
    assert engine.step(Recorder()).cache_events
    assert not engine.has_work()


def test_a_forward_that_fails_ends_its_requests_and_no_others(
    make_engine: MakeEngine, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()

    def fail(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory for 75 tokens")

    with monkeypatch.context() as patch:
        patch.setattr(engine._model, "hidden", fail)
        engine.submit(make_request(1, PROMPT))
        output = engine.step(Recorder())
    [token] = output.tokens
    assert token.finish_reason == "error" and token.error is not None and "no memory" in token.error
    assert output.timing is None and output.load.blocks_active == 0
    assert outputs(engine, [PROMPT]) == [expected]


def test_a_lost_device_ends_the_engine(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()

    def fail(*_: object) -> torch.Tensor:
        raise torch.AcceleratorError("illegal memory access")

    monkeypatch.setattr(engine._model, "hidden", fail)
    engine.submit(make_request(1, PROMPT))
    with pytest.raises(torch.AcceleratorError):
        engine.step(Recorder())


def test_what_is_wrong_with_a_request_comes_back_as_a_token(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.submit(make_request(1, [5] * 2040))
    [token] = run(engine)
    assert token.error is not None and "2048" in token.error


def test_the_cache_holds_at_least_one_full_context(make_engine: MakeEngine) -> None:
    engine = make_engine(kv_blocks=None)
    [geometry] = engine.info.geometry
    assert geometry.num_blocks == (1 << 30) // (4 * 2 * 8 * 2 * 16 * 4)
    assert geometry.dtype == "float32" and engine.info.context_length == 2048


def test_cuda_is_refused_where_there_is_none(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device"):
        make_engine(device="cuda")
