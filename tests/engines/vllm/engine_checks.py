"""A vLLM engine through the Engine protocol. Run where vLLM is installed: test_vllm_in_environment.py."""

from __future__ import annotations

import dataclasses
import json
import random
import time
from collections.abc import Iterator

import msgspec
import pytest
from tiny_model import write_tiny_model
from vllm_bench import Bench, greedy, random_prompt

from dynrt.engines.config import EngineConfig
from dynrt.engines.protocol import EngineRequest, Token
from dynrt.engines.vllm.environment import prepare_process
from dynrt.planner.events import ROOT, BlocksRemoved, BlocksStored
from dynrt.runtime.errors import ConfigError, InvalidRequestError
from dynrt.runtime.messages import Grammar, unpack_ids

BLOCK_SIZE = 32
CHUNK = 64  # tokens in a step
NUM_BLOCKS = 28


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    model_dir = write_tiny_model(tmp_path_factory.mktemp("model"), head_size=32)
    config = EngineConfig(
        str(model_dir),
        "tiny",
        kind="vllm",
        dtype="float32",
        threads=1,
        kv_blocks=NUM_BLOCKS,
        max_batch_tokens=CHUNK,
    )
    prepare_process(config)
    return config


@pytest.fixture(scope="module")
def the_bench(config: EngineConfig) -> Iterator[Bench]:
    from dynrt.engines.vllm.engine import VllmEngine

    engine = VllmEngine(config)
    yield Bench(engine)
    engine.close()


@pytest.fixture
def bench(the_bench: Bench) -> Iterator[Bench]:
    the_bench.copier.announced.clear()
    yield the_bench
    the_bench.assert_clean()


def token_ids(tokens: list[Token]) -> list[int]:
    return [token.token_id for token in tokens]


# --- what it is -----------------------------------------------------------------------------------


def test_info(bench: Bench) -> None:
    info = bench.engine.info
    assert (info.kind, info.first_token_from, info.takes_grammar) == ("vllm", "decode", True)
    assert info.context_length == NUM_BLOCKS * BLOCK_SIZE, "as much as the cache holds"
    geometry = info.geometry[0]
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_size) == (4, 2, 32)
    assert geometry.num_blocks == NUM_BLOCKS + 1 and geometry.block_size == BLOCK_SIZE
    assert geometry.order.startswith("block,head,vllm-cpu-")
    assert bench.engine.load().blocks_total == NUM_BLOCKS


@pytest.mark.parametrize(
    ("engine_args", "told"),
    [
        ({"max_modle_len": "7"}, "max_modle_len is no argument .* which have max_model_len"),
        ({"kv-transfer-config": "{}"}, "kv-transfer-config is set by dynrt itself"),
        ({"pipeline_parallel_size": "2"}, "pipeline_parallel_size is set by dynrt itself"),
    ],
)
def test_engine_arg_is_refused_before_anything_is_loaded(
    config: EngineConfig, engine_args: dict[str, str], told: str
) -> None:
    from dynrt.engines.vllm.engine import VllmEngine

    nowhere = msgspec.structs.replace(config, model_dir="/nowhere", engine_args=engine_args)
    with pytest.raises(ConfigError, match=told):
        VllmEngine(nowhere)


def test_engine_args_go_over_our_own(config: EngineConfig) -> None:
    from dynrt.engines.vllm.arguments import engine_arguments

    given = {"max-model-len": "640", "quantization": "fp8", "block_size": "64"}
    arguments = engine_arguments(msgspec.structs.replace(config, engine_args=given), "link")
    assert (arguments.max_model_len, arguments.quantization, arguments.block_size) == (640, "fp8", 64)
    assert arguments.max_num_batched_tokens == CHUNK
    with pytest.raises(ConfigError, match="--device is 'cuda' and the vLLM installed here computes on 'cpu'"):
        engine_arguments(msgspec.structs.replace(config, device="cuda"), "link")


def test_layouts_that_are_not_known_are_refused(bench: Bench) -> None:
    from dynrt.engines.vllm.layout import layout_of

    llm, core = bench.engine._llm, bench.engine._llm.engine_core.engine_core
    caches = {name: module.kv_cache for name, module in _modules(llm).items()}
    cache_config = core.scheduler.kv_cache_config

    def told(**changed: object) -> str:
        with pytest.raises(ConfigError) as refused:
            layout_of(llm.vllm_config, dataclasses.replace(cache_config, **changed), caches)
        return refused.value.message

    assert layout_of(llm.vllm_config, cache_config, caches).geometry == bench.engine.info.geometry[0]
    assert "laid out as BHLNC for CPU_ATTN; --engine vllm knows LBHNC" in told(kv_cache_layout="BHLNC")
    assert "groups of FullAttentionSpec, FullAttentionSpec" in told(
        kv_cache_groups=2 * cache_config.kv_cache_groups
    )
    assert "has 29 blocks" in told(num_blocks=30)


def _modules(llm: object) -> dict[str, object]:
    context = llm.vllm_config.compilation_config.static_forward_context  # type: ignore[attr-defined]
    return {name: module for name, module in context.items() if hasattr(module, "kv_cache")}


# --- handoffs -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 2, 31, 32, 33, 64, 65, 200, 300])
def test_handed_off_is_local(bench: Bench, num_tokens: int) -> None:
    prompt = random_prompt(num_tokens, seed=num_tokens)
    local = bench.local(prompt, greedy(), salt="local")
    handed = bench.hand_off(prompt, greedy())
    assert token_ids(handed) == token_ids(local) and len(local) == 12
    assert handed[-1].finish_reason == "length"
    assert handed[0].cached_tokens == 0


def test_chunks_are_announced_as_they_complete(bench: Bench) -> None:
    prompt = random_prompt(300, seed=1)
    begun_at = time.monotonic()
    first, *others = bench.hand_off(prompt, greedy(), prefill_salt="chunks")
    assert first.admitted_at is not None and begun_at < first.admitted_at < time.monotonic()
    assert all(token.admitted_at is None for token in others)
    announced = [(b.first_block, len(b.block_ids), b.written) for b in bench.copier.announced]
    assert announced == [(0, 2, False), (2, 2, False), (4, 2, False), (6, 2, False), (8, 2, False)]


@pytest.mark.parametrize(("prefill_hit", "decode_hit"), [(True, False), (False, True), (True, True)])
def test_prefix_hits(bench: Bench, prefill_hit: bool, decode_hit: bool) -> None:
    shared = random_prompt(160, seed=10 + 2 * prefill_hit + decode_hit)
    prompt = shared + random_prompt(37, seed=4)
    salts = {"salt": f"d{prefill_hit}{decode_hit}", "prefill_salt": f"p{prefill_hit}{decode_hit}"}
    for salt, is_hit in zip(salts.values(), (decode_hit, prefill_hit), strict=True):
        if is_hit:
            bench.local(shared, greedy(), salt=salt)
    bench.copier.announced.clear()
    handed = bench.hand_off(prompt, greedy(), **salts)
    assert token_ids(handed) == token_ids(bench.local(prompt, greedy(), salt="alone"))
    assert handed[0].cached_tokens == (160 if decode_hit else 0)
    written = [b for b in bench.copier.announced if b.written]
    assert [len(b.block_ids) for b in written] == ([5] if prefill_hit else [])


def test_hit_on_what_another_prompt_computes_in_the_same_step(bench: Bench) -> None:
    shared = random_prompt(32, seed=60)
    prompts = [shared + random_prompt(n, seed=61) for n in (1, 5)]
    expected = [token_ids(bench.local(prompt, greedy(), salt="one")) for prompt in prompts]
    pairs = [(bench.new_id(), bench.new_id()) for _ in prompts]
    for (prefill, decode), prompt in zip(pairs, prompts, strict=True):
        bench.copier.aim(prefill, bench.reserve(EngineRequest(*decode, prompt, greedy(), salt=str(prefill))))
    for (prefill, _decode), prompt in zip(pairs, prompts, strict=True):
        bench.engine.submit(EngineRequest(*prefill, prompt, greedy(), salt="step", prefill_only=True))
    bench.outputs.clear()
    bench.step()
    timing = bench.outputs[0].timing
    assert timing is not None and timing.prefill_tokens == 33 + 5, "the second one had a hit"
    assert not any(blocks.written for blocks in bench.copier.announced)
    for prefill, decode in pairs:
        bench.engine.release(*prefill)
        bench.engine.commit(*decode, None)
    bench.run()
    assert [bench.ids(decode) for _prefill, decode in pairs] == expected


def test_several_at_once(bench: Bench) -> None:
    prompts = [random_prompt(20 + 17 * n, seed=50 + n) for n in range(5)]
    expected = [token_ids(bench.local(prompt, greedy(8), salt="one")) for prompt in prompts]
    pairs = [(bench.new_id(), bench.new_id()) for _ in prompts]
    for (prefill, decode), prompt in zip(pairs, prompts, strict=True):
        bench.copier.aim(prefill, bench.reserve(EngineRequest(*decode, prompt, greedy(8), salt="d")))
    for (prefill, _decode), prompt in zip(pairs, prompts, strict=True):
        bench.engine.submit(EngineRequest(*prefill, prompt, greedy(8), salt="p", prefill_only=True))
    for prefill, decode in pairs:
        bench.run(lambda prefill=prefill: bool(bench.ids(prefill)))
        bench.engine.release(*prefill)
        bench.engine.commit(*decode, None)
    bench.run()
    assert [bench.ids(decode) for _prefill, decode in pairs] == expected


def test_target_that_comes_late(bench: Bench) -> None:
    """Prefill ends before decode had room: its blocks wait, pinned, whoever else comes meanwhile."""
    prompt = random_prompt(100, seed=70)
    expected = token_ids(bench.local(prompt, greedy(), salt="late"))
    prefill, decode = bench.new_id(), bench.new_id()
    bench.engine.submit(EngineRequest(*prefill, prompt, greedy(), salt="p70", prefill_only=True))
    bench.run()
    assert len(bench.ids(prefill)) == 1 and bench.engine.load().blocks_active == 4
    for seed in range(71, 76):  # as much as the whole cache, and more
        bench.local(random_prompt(250, seed), greedy(4))
    bench.copier.aim(prefill, bench.reserve(EngineRequest(*decode, prompt, greedy())))
    bench.engine.release(*prefill)
    bench.engine.commit(*decode, None)
    bench.run()
    assert bench.ids(decode) == expected


def test_prefills_token_is_the_first_of_what_was_asked(bench: Bench) -> None:
    prompt = random_prompt(40, seed=80)
    first = bench.local(prompt, greedy(1))[0]
    assert first.finish_reason == "length"
    for max_tokens, finish in ((1, "length"), (5, None)):
        prefill = bench.submit(prompt, greedy(max_tokens), prefill_only=True)
        bench.run()
        (token,) = bench.tokens[prefill]
        assert (token.token_id, token.finish_reason) == (first.token_id, finish)
        bench.engine.release(*prefill)


# --- room -----------------------------------------------------------------------------------------


def test_reservation_waits_for_room_without_spinning(bench: Bench) -> None:
    first, second = (EngineRequest(*bench.new_id(), random_prompt(500, n), greedy(1)) for n in (90, 91))
    bench.reserve(first)
    assert bench.engine.reserve(second) is None
    bench.run()  # ends: nothing to do, though a request waits
    assert bench.engine.reserve(second) is None and not bench.engine.has_work()
    bench.engine.release(first.key, first.epoch)
    assert bench.engine.has_work()
    assert len(bench.reserve(second).block_ids) == 16
    bench.engine.release(second.key, second.epoch)


def test_reservation_that_can_never_be(bench: Bench) -> None:
    for prompt, told in (([], "the prompt is empty"), ([5] * 900, "exceed the context length of 896")):
        with pytest.raises(InvalidRequestError, match=told):
            bench.engine.reserve(EngineRequest(*bench.new_id(), prompt, greedy()))


def test_decode_is_preempted_and_goes_on(bench: Bench) -> None:
    prompts = [random_prompt(100, seed=100 + n) for n in range(5)]
    expected = [token_ids(bench.local(prompt, greedy(100), salt="one")) for prompt in prompts]
    preempted_before = bench.engine.load().preemptions_total
    decodes = []
    for prompt in prompts:
        prefill, decode = bench.new_id(), bench.new_id()
        bench.copier.aim(prefill, bench.reserve(EngineRequest(*decode, prompt, greedy(100), salt="d")))
        bench.engine.submit(EngineRequest(*prefill, prompt, greedy(100), salt="p", prefill_only=True))
        bench.run(lambda prefill=prefill: bool(bench.ids(prefill)))
        bench.engine.release(*prefill)
        bench.engine.commit(*decode, None)
        decodes.append(decode)
    bench.run()
    assert bench.engine.load().preemptions_total > preempted_before
    assert [bench.ids(decode) for decode in decodes] == expected


# --- the end of requests, in every state ----------------------------------------------------------


def test_cancel_before_anything_ran(bench: Bench) -> None:
    generate = bench.submit(random_prompt(50, 1), greedy())
    prefill = bench.submit(random_prompt(50, 2), greedy(), prefill_only=True)
    reserve = bench.new_id()
    assert bench.engine.reserve(EngineRequest(*reserve, random_prompt(50, 3), greedy())) is None
    for request_id in (generate, prefill, reserve):
        bench.engine.cancel(*request_id)
        bench.engine.cancel(*request_id)
    bench.run()
    assert not bench.ids(generate) and not bench.ids(prefill)


def test_cancel_of_a_running_request(bench: Bench) -> None:
    request_id = bench.submit(random_prompt(150, 5), greedy(50))
    bench.run(lambda: len(bench.ids(request_id)) == 3)
    bench.engine.cancel(*request_id)
    bench.run()
    assert len(bench.ids(request_id)) == 3


def test_cancelled_prefill_keeps_its_announced_blocks_until_release(bench: Bench) -> None:
    prefill = bench.submit(random_prompt(300, 6), greedy(), prefill_only=True, salt="cancelled")
    bench.run(lambda: len(bench.copier.announced) == 2)
    bench.engine.cancel(*prefill)
    bench.run()
    assert bench.engine.load().blocks_active == 4
    bench.engine.release(*prefill)


def test_prefill_released_in_mid_prompt_computes_on_unannounced(bench: Bench) -> None:
    prefill = bench.submit(random_prompt(300, 7), greedy(), prefill_only=True, salt="released")
    bench.run(lambda: len(bench.copier.announced) == 2)
    bench.engine.release(*prefill)
    bench.run()
    assert len(bench.copier.announced) == 2 and len(bench.ids(prefill)) == 1


def test_reservation_is_left_to_its_handoff_by_a_cancel(bench: Bench) -> None:
    request = EngineRequest(*bench.new_id(), random_prompt(100, 8), greedy())
    bench.reserve(request)
    bench.engine.cancel(request.key, request.epoch)
    bench.run()
    assert bench.engine.load().blocks_active == 4
    bench.engine.release(request.key, request.epoch)
    bench.engine.release(request.key, request.epoch)


def test_reservation_made_but_not_taken_is_freed_by_a_cancel(bench: Bench) -> None:
    request = EngineRequest(*bench.new_id(), random_prompt(100, 9), greedy())
    bench.engine.reserve(request)
    bench.step()
    assert bench.engine.load().blocks_active == 4
    bench.engine.cancel(request.key, request.epoch)


def test_cancel_right_behind_a_commit(bench: Bench) -> None:
    request = EngineRequest(*bench.new_id(), random_prompt(100, 10), greedy())
    bench.reserve(request)
    bench.engine.commit(request.key, request.epoch, None)
    bench.engine.cancel(request.key, request.epoch)
    bench.run()
    assert not bench.ids((request.key, request.epoch))


def test_given_up_transfer_and_then_computed_here(bench: Bench) -> None:
    """What the runtime does when a load fails: the reservation goes back, the next attempt runs on decode alone."""
    prompt = random_prompt(100, 11)
    key, epoch = bench.new_id()
    bench.reserve(EngineRequest(key, epoch, prompt, greedy(), salt="failed"))
    bench.engine.release(key, epoch)
    bench.engine.submit(EngineRequest(key, epoch + 1, prompt, greedy(), salt="failed"))
    bench.run()
    assert bench.ids((key, epoch + 1)) == token_ids(bench.local(prompt, greedy(), salt="other"))


@pytest.mark.parametrize("seed", range(6))
def test_storm(bench: Bench, seed: int) -> None:
    """Handoffs and local requests in random order, many cancelled at a random moment; who ends has the right tokens."""
    rng = random.Random(seed)
    prompts = [random_prompt(rng.choice([3, 40, 90, 170]), seed=200 + n) for n in range(4)]
    expected = [token_ids(bench.local(prompt, greedy(40), salt="calm")) for prompt in prompts]
    storm = Storm(bench, rng, prompts)
    for _ in range(300):
        storm.act()
    storm.calm_down()
    assert len(storm.ended) > 5
    for which, request_id in storm.ended:
        assert bench.ids(request_id) == expected[which]


class Storm:
    """Keeps what the runtime and the transfer thread would know: which end of which handoff is how far."""

    def __init__(self, bench: Bench, rng: random.Random, prompts: list[list[int]]) -> None:
        self.bench, self.rng, self.prompts = bench, rng, prompts
        self.pending: list[
            tuple[int, EngineRequest, tuple[bytes, int]]
        ] = []  # reservations that wait, oldest first
        self.open: list[
            tuple[int, tuple[bytes, int], tuple[bytes, int]]
        ] = []  # prefill and decode of each handoff
        self.running: list[tuple[int, tuple[bytes, int]]] = []
        self.cancelled: set[tuple[bytes, int]] = set()

    @property
    def ended(self) -> list[tuple[int, tuple[bytes, int]]]:
        return [(which, request_id) for which, request_id in self.running if request_id not in self.cancelled]

    def act(self) -> None:
        draw = self.rng.random()
        if draw < 0.05 and len(self.pending) + len(self.open) < 5:
            self._begin()
        elif draw < 0.08:
            which = self.rng.randrange(len(self.prompts))
            self.running.append((which, self.bench.submit(self.prompts[which], greedy(40), salt="l")))
        elif draw < 0.11:
            self._cancel()
        else:
            self._turn()

    def calm_down(self) -> None:
        while self.pending or self.open:
            self._turn()
        self.bench.run()

    def _begin(self) -> None:
        which, prefill, decode = (
            self.rng.randrange(len(self.prompts)),
            self.bench.new_id(),
            self.bench.new_id(),
        )
        prompt = self.prompts[which]
        self.bench.engine.submit(EngineRequest(*prefill, prompt, greedy(40), salt="p", prefill_only=True))
        self.pending.append((which, EngineRequest(*decode, prompt, greedy(40), salt="d"), prefill))

    def _turn(self) -> None:
        """As the compute thread: reservations, then a step; then what came of it, as the transfer thread would."""
        if self.pending:
            which, request, prefill = self.pending[0]
            made = self.bench.engine.reserve(request)
            if made is not None:
                self.bench.copier.aim(prefill, made)
                self.open.append((which, prefill, (request.key, request.epoch)))
                self.pending.pop(0)
        if self.bench.engine.has_work():
            self.bench.step()
        for handoff in list(self.open):
            which, prefill, decode = handoff
            if self.bench.ids(prefill):
                self.open.remove(handoff)
                self.bench.engine.release(*prefill)
                self.bench.engine.commit(*decode, None)
                self.running.append((which, decode))

    def _cancel(self) -> None:
        draw = self.rng.random()
        if draw < 0.3 and self.pending:
            _which, request, prefill = self.pending.pop(self.rng.randrange(len(self.pending)))
            self.bench.engine.cancel(request.key, request.epoch)
            self.bench.engine.cancel(*prefill)
            self.bench.engine.release(*prefill)
        elif draw < 0.6 and self.open:
            _which, prefill, decode = self.open.pop(self.rng.randrange(len(self.open)))
            for request_id in (prefill, decode):
                self.bench.engine.cancel(*request_id)
            self._turn()
            for request_id in (prefill, decode):
                self.bench.engine.release(*request_id)
        elif self.running:
            _which, request_id = self.rng.choice(self.running)
            self.bench.engine.cancel(*request_id)
            self.cancelled.add(request_id)


# --- sampling -------------------------------------------------------------------------------------


def test_what_is_wrong_with_a_request_comes_back_as_a_token(bench: Bench) -> None:
    broken = Grammar("json_schema", '{"type": 7}')
    cases = [
        ([], greedy(), "the prompt is empty"),
        ([600], greedy(), "outside the vocabulary of 512"),
        ([5], greedy(logprobs=600), "logprobs"),
        ([5], greedy(grammar=broken), ""),
    ]
    for prompt, sampling, told in cases:
        (token,) = bench.local(prompt, sampling)
        assert token.finish_reason == "error" and token.token_id == -1
        assert token.error is not None and told in token.error


def test_grammar_is_obeyed_here_and_handed_off(bench: Bench) -> None:
    choice = Grammar("choice", json.dumps(["blue", "green", "a very long colour"]))
    sampling = greedy(40, grammar=choice, ignore_eos=False)
    prompt = random_prompt(70, seed=300)
    local = bench.local(prompt, sampling)
    handed = bench.hand_off(prompt, sampling)
    assert token_ids(local) == token_ids(handed) and local[-1].finish_reason == "stop"
    assert local[-1].stop_reason is None, "the end of sequence is no stop id"


def test_grammar_that_turns_out_not_to_compile(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise RuntimeError("no such grammar")

    sampling = greedy(grammar=Grammar("regex", "a+b"))
    assert bench.local([5, 6], sampling)[-1].finish_reason == "length"
    manager = bench.engine._llm.engine_core.engine_core.structured_output_manager
    monkeypatch.setattr(manager.backend, "compile_grammar", fail)
    (token,) = bench.local([5, 6], sampling)
    assert token.finish_reason == "error" and token.error is not None
    with pytest.raises(InvalidRequestError, match="vLLM ended the request"):
        bench.reserve(EngineRequest(*bench.new_id(), [5, 6], sampling))


def test_logprobs(bench: Bench) -> None:
    prompt = random_prompt(50, seed=301)
    tokens = bench.local(prompt, greedy(3, logprobs=2, prompt_logprobs=1))
    for token in tokens:
        assert token.logprob is not None and token.logprob.token_id == token.token_id
        assert token.logprob.top[0][0] == token.token_id, "greedy takes the likeliest"
        assert len(token.logprob.top) == 2 and token.logprob.top[0][1] == token.logprob.logprob
    of_prompt = tokens[0].prompt_logprobs
    assert of_prompt is not None and len(of_prompt) == 50 and of_prompt[0] is None
    assert [one.token_id for one in of_prompt[1:] if one] == prompt[1:]
    assert all(len(one.top) == 1 and one.logprob <= one.top[0][1] for one in of_prompt[1:] if one)
    assert tokens[1].prompt_logprobs is None
    handed = bench.hand_off(prompt, greedy(3, logprobs=2, prompt_logprobs=1))
    assert [token.logprob and token.logprob.token_id for token in handed] == token_ids(tokens)
    for ours, theirs in zip(handed, tokens, strict=True):
        assert ours.logprob and theirs.logprob
        assert ours.logprob.logprob == pytest.approx(theirs.logprob.logprob, abs=1e-4)


def test_seed_bias_and_limits(bench: Bench) -> None:
    prompt = random_prompt(50, seed=302)
    drawn = [
        token_ids(bench.local(prompt, greedy(8, temperature=1.0, seed=seed, top_k=50, min_p=0.01)))
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    handed = bench.hand_off(prompt, greedy(8, temperature=1.0, seed=1, top_k=50, min_p=0.01))
    assert token_ids(handed) == drawn[0]
    assert token_ids(bench.local(prompt, greedy(3, logit_bias=((77, 100.0),)))) == [77] * 3
    plain = token_ids(bench.local(prompt, greedy(12)))
    stop_id = plain[4]
    first_at = plain.index(stop_id)
    stopped = bench.local(prompt, greedy(12, stop_token_ids=(stop_id,)))
    assert token_ids(stopped) == plain[: first_at + 1]
    assert (stopped[-1].finish_reason, stopped[-1].stop_reason) == ("stop", stop_id)
    longer = bench.local(prompt, greedy(12, stop_token_ids=(stop_id,), min_tokens=first_at + 2))
    assert len(longer) > first_at + 1
    varied = token_ids(bench.local(prompt, greedy(12, presence_penalty=2.0, repetition_penalty=5.0)))
    assert len(set(varied)) == 12


def test_seed_does_not_depend_on_how_many_steps_the_prompt_takes(bench: Bench) -> None:
    prompt, drawn = random_prompt(200, seed=31), greedy(temperature=1.0, seed=3)
    in_chunks = bench.local(prompt, drawn, salt="seed")
    at_once = bench.local(prompt, drawn, salt="seed")
    assert (in_chunks[0].cached_tokens, at_once[0].cached_tokens) == (0, 192)
    assert token_ids(in_chunks) == token_ids(at_once) == token_ids(bench.hand_off(prompt, drawn))


def test_goes_on_behind_outputs_generated_elsewhere(bench: Bench) -> None:
    prompt = random_prompt(50, seed=303)
    whole = token_ids(bench.local(prompt, greedy(12)))
    rest = bench.local(prompt, greedy(12), output_ids=whole[:5], salt="elsewhere")
    assert token_ids(rest) == whole[5:] and rest[-1].finish_reason == "length"


# --- what the planner hears -----------------------------------------------------------------------


def test_cache_events_and_snapshot_tell_the_same(bench: Bench) -> None:
    events = bench.cache_events  # of all tests so far: the cache has overflowed many times
    assert any(isinstance(event, BlocksRemoved) for event in events)
    chains: dict[int, tuple[str, tuple[bytes, ...]]] = {ROOT: ("", ())}
    for event in events:
        if isinstance(event, BlocksStored):
            _follow(chains, event)
        elif isinstance(event, BlocksRemoved):
            for key in event.keys:
                del chains[key]
    told: dict[int, tuple[str, tuple[bytes, ...]]] = {ROOT: ("", ())}
    for stored in bench.engine.cache_snapshot():
        _follow(told, stored)
    assert told == chains and len(chains) > 5
    prompt = random_prompt(80, seed=400)
    bench.local(prompt, greedy(1), salt="tenant")
    stored = [event for event in bench.cache_events if isinstance(event, BlocksStored)][-1]
    assert unpack_ids(stored.token_ids) == prompt[:64] and stored.salt == "tenant"
    assert bench.local(prompt, greedy(1), salt="tenant")[0].cached_tokens == 64
    assert bench.local(prompt, greedy(1), salt="somebody else")[0].cached_tokens == 0


def _follow(chains: dict[int, tuple[str, tuple[bytes, ...]]], stored: BlocksStored) -> None:
    _salt, chain = chains[stored.parent_key]
    size = len(stored.token_ids) // len(stored.keys)
    for index, key in enumerate(stored.keys):
        chain = (*chain, stored.token_ids[index * size : (index + 1) * size])
        assert key not in chains
        chains[key] = stored.salt, chain


def test_load_and_timing(bench: Bench) -> None:
    bench.outputs.clear()
    request_id = bench.submit(random_prompt(100, seed=401), greedy(3), salt="timed")
    waiting = bench.submit(random_prompt(30, seed=402), greedy(1), salt="timed")
    assert bench.engine.load().waiting_requests == 2
    bench.run(lambda: len(bench.ids(request_id)) == 2)
    timings = [output.timing for output in bench.outputs if output.timing is not None]
    assert [timing.prefill_tokens for timing in timings] == [64, 64, 2]
    assert timings[0].prefill_context == 64**2 and timings[-1].decode_requests == 1
    assert bench.engine.load().running_requests == 2 or bench.ids(waiting)
    bench.run()
