"""The scheduler: whatever comes in whatever order, every request gets the tokens it would get alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fake_kv import VOCAB, FakeKvEngine, expected_outcome, finish_of, next_token
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dynrt.engines.protocol import EngineRequest, Reservation, Token
from dynrt.runtime.errors import InvalidRequestError
from dynrt.runtime.messages import SamplingParams, TokenLogprob

MAX_STEPS = 2000  # no test's requests need more


def make_request(
    number: int,
    prompt_ids: Sequence[int],
    max_tokens: int = 6,
    output_ids: Sequence[int] = (),
    prefill_only: bool = False,
    salt: str = "",
    **sampling: Any,
) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **({"ignore_eos": True} | sampling))
    key = number.to_bytes(16, "little")
    return EngineRequest(key, 0, prompt_ids, params, output_ids, salt, prefill_only)


def run(engine: FakeKvEngine) -> list[Token]:
    """Step until nothing can be done."""
    tokens: list[Token] = []
    for _ in range(MAX_STEPS):
        if not engine.scheduler.has_work():
            return tokens
        tokens += engine.step()
    raise AssertionError("the scheduler never comes to rest")


def outputs_of(tokens: Sequence[Token], request: EngineRequest) -> list[int]:
    mine = [token.token_id for token in tokens if token.key == request.key]
    return [*request.output_ids, *mine]


def scores_of(request: EngineRequest) -> list[TokenLogprob | None] | None:
    """What comes with the first token of the output."""
    if request.sampling.prompt_logprobs is None:
        return None
    return [None, *(TokenLogprob(token_id, 0.0) for token_id in request.prompt_ids[1:])]


def prompt(length: int, start: int = 1) -> list[int]:
    return [(start + i * i) % VOCAB for i in range(length)]


def test_a_request_runs_to_its_length() -> None:
    engine, request = FakeKvEngine(), make_request(1, prompt(9))
    engine.submit(request)
    tokens = run(engine)
    assert outputs_of(tokens, request) == expected_outcome(request)[0]
    assert [token.finish_reason for token in tokens] == [None] * 5 + ["length"]
    assert [token.cached_tokens for token in tokens] == [0] + [None] * 5
    assert engine.pool.num_active == 0


def test_prompts_are_computed_in_chunks_behind_the_decodes() -> None:
    engine = FakeKvEngine(max_batch_tokens=8)
    engine.submit(make_request(1, prompt(4)))
    engine.step()
    engine.submit(make_request(2, prompt(20, start=5)))
    batch = engine.scheduler.schedule(0.0)
    assert [(len(chunk.token_ids), chunk.start) for chunk in batch.chunks] == [(1, 4), (7, 0)]


def test_a_request_tells_when_the_first_step_over_its_prompt_began() -> None:
    engine = FakeKvEngine(max_batch_tokens=8)
    engine.submit(make_request(1, prompt(20), max_tokens=2))
    tokens = run(engine)
    assert [token.admitted_at for token in tokens] == [1.0, None]
    assert engine.now == 4.0, "its prompt took three"


def test_a_prefix_hit_is_not_computed_again_but_the_last_token_is() -> None:
    engine = FakeKvEngine()
    for number in (1, 2):
        engine.submit(make_request(number, prompt(8), max_tokens=1))
        tokens = run(engine)
    assert tokens[0].cached_tokens == 4  # of 8: the second block holds the last token
    engine.submit(make_request(3, prompt(9), max_tokens=1))
    assert run(engine)[0].cached_tokens == 8


def test_a_salt_keeps_requests_apart() -> None:
    engine = FakeKvEngine()
    for number, salt in enumerate(("a", "b")):
        engine.submit(make_request(number, prompt(9), salt=salt))
        assert run(engine)[0].cached_tokens == 0


@pytest.mark.parametrize(
    ("sampling", "finish"),
    [
        ({"ignore_eos": False}, ("stop", None)),
        ({"stop_token_ids": tuple(range(1, VOCAB))}, ("stop", "itself")),
        ({"ignore_eos": True}, ("length", None)),
    ],
)
def test_finish_reasons(sampling: dict[str, Any], finish: tuple[str, Any]) -> None:
    engine, request = FakeKvEngine(num_blocks=64), make_request(1, [5], max_tokens=100, **sampling)
    engine.submit(request)
    last = run(engine)[-1]
    stop_reason = last.token_id if finish[1] == "itself" else None
    assert (last.finish_reason, last.stop_reason) == (finish[0], stop_reason)


def test_min_tokens_bans_what_would_end_the_request() -> None:
    engine = FakeKvEngine()
    engine.submit(make_request(1, [5], ignore_eos=False, stop_token_ids=(4, 7), min_tokens=2, output_ids=[3]))
    for expected in ((0, 4, 7), ()):
        batch = engine.scheduler.schedule(0.0)
        assert batch.chunks[0].sample is not None and batch.chunks[0].sample.banned_ids == expected
        engine.scheduler.advance(batch, [9])


def test_growth_without_room_preempts_the_youngest_which_then_goes_on() -> None:
    engine = FakeKvEngine(num_blocks=5, block_size=4)
    requests = [make_request(number, prompt(4, start=number), max_tokens=12) for number in range(3)]
    for request in requests:
        engine.submit(request)
    tokens = run(engine)
    assert engine.scheduler.load().preemptions_total > 0
    for request in requests:
        assert outputs_of(tokens, request) == expected_outcome(request)[0]
    finished = [token.key for token in tokens if token.finish_reason]
    assert finished[0] == requests[0].key, "the oldest is never preempted"
    assert engine.pool.num_active == 0


def test_a_preempted_request_comes_before_those_who_never_ran() -> None:
    engine = FakeKvEngine(num_blocks=5, max_batch_requests=2)
    oldest, preempted, new = (make_request(i, prompt(4, start=i), max_tokens=10) for i in range(3))
    for request in (oldest, preempted, new):
        engine.submit(request)
    while engine.scheduler.load().preemptions_total == 0:
        tokens = engine.step()
    tokens += run(engine)
    others = [token.key for token in tokens if token.key != oldest.key]
    assert others[0] == preempted.key and new.key in others


def test_nobody_is_admitted_into_the_room_that_a_running_request_grows_into() -> None:
    engine = FakeKvEngine(num_blocks=3)
    engine.submit(make_request(1, prompt(5), max_tokens=8))
    engine.step()
    engine.submit(make_request(2, prompt(3, start=4)))
    run(engine)
    assert engine.scheduler.load().preemptions_total == 0


@pytest.mark.parametrize(
    ("request_", "parts"),
    [
        (make_request(1, prompt(60), max_tokens=10), ["60", "10", "64"]),
        (make_request(1, prompt(40), max_tokens=12), ["51 tokens", "13", "8"]),
        (make_request(1, []), ["empty"]),
        (make_request(1, [1, VOCAB]), [str(VOCAB)]),
        (make_request(1, [1], max_tokens=2, output_ids=[1, 2]), ["max_tokens is 2"]),
        (make_request(1, [1], logit_bias=((1, 2.0), (77, 1.0))), ["77", "12"]),
        (make_request(1, [1], stop_token_ids=(77,)), ["77", "12"]),
    ],
)
def test_what_can_never_run_is_refused_by_name(request_: EngineRequest, parts: list[str]) -> None:
    engine = FakeKvEngine(num_blocks=8, context_length=64)
    engine.submit(request_)
    [token] = run(engine)
    assert token.finish_reason == "error" and token.is_refusal and token.error is not None
    assert all(part in token.error for part in parts), token.error
    with pytest.raises(InvalidRequestError):
        engine.scheduler.reserve(request_)


def test_a_prompt_just_as_large_as_the_cache_runs() -> None:
    engine, request = FakeKvEngine(num_blocks=8), make_request(1, prompt(30), max_tokens=3)
    engine.submit(request)
    assert outputs_of(run(engine), request) == expected_outcome(request)[0]


def test_a_handoff_prompt_is_announced_as_it_grows_and_pinned_until_release() -> None:
    engine = FakeKvEngine(max_batch_tokens=8)
    engine.submit(make_request(1, prompt(8), max_tokens=1))
    run(engine)
    request = make_request(2, prompt(22), prefill_only=True)
    engine.submit(request)
    announced = []
    for _ in range(2):
        batch = engine.scheduler.schedule(0.0)
        announced += [(ready.first_block, len(ready.block_ids), ready.written) for ready in batch.ready]
        tokens = engine.scheduler.advance(batch, [7] * (batch.chunks[0].sample is not None))
    assert announced == [(0, 2, True), (2, 2, False), (4, 2, False)]
    assert [token.token_id for token in tokens] == [7] and tokens[0].finish_reason is None
    assert not engine.scheduler.has_work()
    assert engine.pool.num_active == 6
    engine.release(request.key, 0)
    assert (engine.pool.num_active, engine.pool.num_cached) == (0, 5)


def test_cancel_in_mid_prompt_leaves_only_the_announced_blocks() -> None:
    engine = FakeKvEngine(max_batch_tokens=9)
    request = make_request(1, prompt(30), prefill_only=True)
    engine.submit(request)
    engine.step()
    engine.scheduler.cancel(request.key, 0)
    assert engine.pool.num_active == 2
    engine.scheduler.release(request.key, 0)
    assert engine.pool.num_active == 0 and not engine.scheduler.has_work()


def test_a_preempted_handoff_prompt_announces_only_what_is_new() -> None:
    engine = FakeKvEngine(num_blocks=6, max_batch_tokens=2)
    engine.submit(make_request(1, prompt(4), max_tokens=12))
    for _ in range(2):
        engine.step()
    prefill = make_request(2, prompt(12, start=3), prefill_only=True)
    engine.submit(prefill)
    run(engine)
    assert engine.scheduler.load().preemptions_total == 1
    announced = [(ready.first_block, ready.written) for ready in engine.pinned[prefill.key, 0]]
    assert announced == [(0, False), (1, False), (2, False)]
    engine.release(prefill.key, 0)
    assert engine.pool.num_active == 0


def test_a_pinned_block_keeps_its_ancestors_even_if_another_request_computed_them() -> None:
    engine = FakeKvEngine(max_batch_tokens=9)
    twin, prefill = make_request(1, prompt(5)), make_request(2, prompt(8), prefill_only=True)
    for request in (twin, prefill):
        engine.submit(request)
    engine.step()
    engine.scheduler.cancel(twin.key, 0)
    run(engine)
    assert engine.pool.num_active == 3, (
        "both announced blocks, and the twin's that is the second one's parent"
    )
    engine.pool.allocate(engine.pool.num_available)
    engine.release(prefill.key, 0)
    assert engine.pool.num_cached == 2


def test_release_before_anything_was_announced_changes_nothing() -> None:
    engine, request = FakeKvEngine(), make_request(1, prompt(9), prefill_only=True)
    engine.submit(request)
    engine.scheduler.release(request.key, 0)
    run(engine)
    assert engine.pool.num_active == 3
    engine.release(request.key, 0)
    assert engine.pool.num_active == 0


def test_unknown_requests_are_no_news() -> None:
    engine = FakeKvEngine()
    engine.scheduler.cancel(b"nobody", 3)
    engine.scheduler.release(b"nobody", 3)
    assert not engine.scheduler.has_work()


def reserve_all_but(engine: FakeKvEngine, num_blocks: int) -> EngineRequest:
    size = (engine.pool.num_available - num_blocks) * engine.pool.block_size
    request = make_request(99, prompt(size, start=3), max_tokens=2)
    assert engine.scheduler.reserve(request) is not None
    return request


def test_what_waits_for_reserved_blocks_is_no_work_until_they_come_back() -> None:
    engine = FakeKvEngine(num_blocks=8)
    reserved = reserve_all_but(engine, 2)
    request = make_request(1, prompt(12))
    engine.submit(request)
    assert not engine.scheduler.has_work()
    assert engine.scheduler.schedule(0.0).chunks == []
    engine.scheduler.cancel(reserved.key, 0)
    assert not engine.scheduler.has_work(), "cancel does not free a reservation"
    engine.scheduler.release(reserved.key, 0)
    assert outputs_of(run(engine), request) == expected_outcome(request)[0]


def test_a_lone_request_that_cannot_grow_waits_for_the_reservation() -> None:
    engine = FakeKvEngine(num_blocks=8)
    request = make_request(1, prompt(4), max_tokens=12)
    engine.submit(request)
    engine.step()
    reserved = make_request(99, prompt(24, start=3), max_tokens=2)
    reservation = engine.scheduler.reserve(reserved)
    assert reservation is not None
    tokens = run(engine)
    assert len(tokens) == 4, "up to the end of its second block, then it gives its blocks back"
    engine.receive(reserved, 0, reservation.block_ids)
    engine.scheduler.commit(reserved.key, 0, expected_outcome(reserved)[0][0])
    tokens += run(engine)
    assert [next_token(prompt(4)), *outputs_of(tokens, request)] == expected_outcome(request)[0]


def test_a_reservation_takes_no_room_from_those_who_run_or_wait() -> None:
    engine = FakeKvEngine(num_blocks=8)
    running = make_request(1, prompt(8), max_tokens=12)
    engine.submit(running)
    engine.step()
    assert engine.scheduler.reserve(make_request(2, prompt(24, start=3))) is None
    engine.submit(make_request(3, prompt(20, start=5)))
    assert engine.scheduler.reserve(make_request(4, prompt(4, start=3))) is None


def test_a_reservation_wholly_hit_needs_no_blocks_and_goes_on_at_once() -> None:
    engine = FakeKvEngine()
    engine.submit(make_request(1, prompt(8), max_tokens=1))
    run(engine)
    request = make_request(2, prompt(8))
    reservation = engine.scheduler.reserve(request)
    assert reservation == Reservation(first_block=2, block_ids=[])
    expected = expected_outcome(request)[0]
    engine.scheduler.commit(request.key, 0, expected[0])
    tokens = run(engine)
    assert [expected[0], *outputs_of(tokens, request)] == expected
    assert [token.cached_tokens for token in tokens][:2] == [8, None]
    assert engine.pool.num_active == 0


def test_received_blocks_can_be_hit() -> None:
    engine, request = FakeKvEngine(), make_request(1, prompt(10))
    reservation = engine.scheduler.reserve(request)
    assert reservation is not None and reservation.first_block == 0
    engine.receive(request, 0, reservation.block_ids)
    engine.scheduler.commit(request.key, 0, expected_outcome(request)[0][0])
    engine.submit(make_request(2, prompt(10), max_tokens=1))
    tokens = run(engine)
    assert [token.cached_tokens for token in tokens if token.key != request.key] == [8]


def test_scored_prompts_use_the_cache_for_others_and_after_their_first_token() -> None:
    engine = FakeKvEngine()
    for number, scored, hit in ((1, None, 0), (2, 1, 0), (3, None, 8)):
        engine.submit(make_request(number, prompt(10), max_tokens=1, prompt_logprobs=scored))
        [token] = run(engine)
        assert token.cached_tokens == hit
    engine.submit(make_request(4, prompt(10), prompt_logprobs=1, output_ids=[3]))
    tokens = run(engine)
    assert tokens[0].cached_tokens == 8, "it moved here, and its prompt's scores were told"
    assert [token.prompt_logprobs for token in tokens] == [None] * 5


def test_a_prompt_preempted_half_way_goes_on_being_scored_there() -> None:
    engine = FakeKvEngine(num_blocks=7, max_batch_tokens=2)
    scored = make_request(2, prompt(15), prompt_logprobs=1)
    engine.submit(make_request(1, prompt(7), max_tokens=16))
    while not (tokens := engine.step()):
        pass
    engine.submit(scored)
    while not outputs_of(tokens, scored):  # FakeKvEngine checks that each token is scored once
        tokens = engine.step()
    assert engine.scheduler.load().preemptions_total == 1
    [first] = [token for token in tokens if token.key == scored.key]
    assert first.prompt_logprobs == scores_of(scored)


def test_a_request_in_error_ends_alone_and_what_it_computed_is_kept() -> None:
    engine = FakeKvEngine()
    for number in (1, 2):
        engine.submit(make_request(number, prompt(8, start=number)))
    batch = engine.scheduler.schedule(0.0)
    wrong, right = engine.scheduler.advance(batch, [3, 4], errors={batch.sequences[0].id: "no such word"})
    assert (wrong.finish_reason, wrong.error, wrong.token_id) == ("error", "no such word", -1)
    assert (right.token_id, right.error) == (4, None)
    load = engine.scheduler.load()
    assert (load.running_requests, load.blocks_active, load.blocks_cached) == (1, 2, 2)


def test_a_failed_step_ends_its_requests_and_stores_nothing() -> None:
    engine = FakeKvEngine()
    for number, prefill_only in ((1, False), (2, True)):
        engine.submit(make_request(number, prompt(8, start=number), prefill_only=prefill_only))
    batch = engine.scheduler.schedule(0.0)
    tokens = engine.scheduler.fail(batch, "out of memory")
    assert [(token.finish_reason, token.error) for token in tokens] == [("error", "out of memory")] * 2
    assert engine.pool.num_active == 2, "the announced blocks of the second"
    engine.scheduler.release(make_request(2, []).key, 0)
    assert (engine.pool.num_active, engine.pool.num_cached) == (0, 0)
    assert not engine.scheduler.has_work()


PROMPTS = st.builds(
    lambda family, length, tail: prompt(length, start=family) + tail,
    st.integers(0, 1),
    st.integers(1, 14),
    st.lists(st.integers(0, VOCAB - 1), max_size=2),
)
SAMPLING = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(3, 12),
        "min_tokens": st.integers(0, 3),
        "ignore_eos": st.booleans(),
        "stop_token_ids": st.sampled_from([(), (1,), (0, 2)]),
        "output_ids": st.lists(st.integers(3, VOCAB - 1), max_size=2),
        "salt": st.sampled_from(["", "", "a"]),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "repetition_penalty": st.sampled_from([1.0, 2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.5]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """All events in any order; FakeKvEngine checks the KV, this checks tokens and that nothing is left."""

    @initialize(
        num_blocks=st.integers(7, 14),
        block_size=st.sampled_from([2, 4]),
        max_batch_tokens=st.integers(1, 24),
        max_batch_requests=st.integers(1, 5),
    )
    def start(self, **sizes: int) -> None:
        self.engine = FakeKvEngine(**sizes)
        self.open: dict[bytes, EngineRequest] = {}  # not yet finished or cancelled
        self.prefilled: dict[bytes, EngineRequest] = {}  # to be released some day
        self.outputs: dict[bytes, list[int]] = {}
        self.reservations: dict[bytes, tuple[EngineRequest, Reservation]] = {}
        self.count = 0

    @rule(prompt_ids=PROMPTS, sampling=SAMPLING, prefill_only=st.booleans())
    def submit(self, prompt_ids: list[int], sampling: dict[str, Any], prefill_only: bool) -> None:
        request = self.new_request(prompt_ids, sampling, prefill_only)
        self.watch(request, [])
        if prefill_only:
            self.prefilled[request.key] = request
        self.engine.submit(request)

    @rule(prompt_ids=PROMPTS, sampling=SAMPLING)
    def reserve(self, prompt_ids: list[int], sampling: dict[str, Any]) -> None:
        request = self.new_request(prompt_ids, sampling)
        preemptions = self.engine.scheduler.load().preemptions_total
        try:
            reservation = self.engine.scheduler.reserve(request)
        except InvalidRequestError:
            return
        assert self.engine.scheduler.load().preemptions_total == preemptions
        if reservation is not None:
            self.reservations[request.key] = request, reservation

    def new_request(
        self, prompt_ids: list[int], sampling: dict[str, Any], prefill_only: bool = False
    ) -> EngineRequest:
        self.count += 1
        return make_request(self.count, prompt_ids, prefill_only=prefill_only, **sampling)

    def watch(self, request: EngineRequest, first_tokens: list[int]) -> None:
        self.open[request.key] = request
        self.outputs[request.key] = [*request.output_ids, *first_tokens]

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def commit(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.reservations)))
        request, reservation = self.reservations.pop(key)
        outputs = expected_outcome(request)[0]
        first_token = outputs[len(request.output_ids)]
        self.engine.receive(request, reservation.first_block, reservation.block_ids)
        if finish_of(request, [*request.output_ids, first_token])[0] is not None:
            self.engine.release(key, 0)
        else:
            self.engine.scheduler.commit(key, 0, first_token)
            self.watch(request, [first_token])

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def give_up_reservation(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.reservations)))
        del self.reservations[key]
        self.engine.release(key, 0)

    @precondition(lambda self: self.open or self.reservations)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted([*self.open, *self.reservations])))
        self.open.pop(key, None)
        self.engine.scheduler.cancel(key, 0)

    @precondition(lambda self: self.prefilled)
    @rule(data=st.data())
    def release_source(self, data: Any) -> None:
        key = data.draw(st.sampled_from(sorted(self.prefilled)))
        self.engine.release(key, 0)

    @rule(count=st.integers(1, 9))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.engine.step())

    @rule()
    def fail_step(self) -> None:
        self.take(self.engine.fail_step())

    def take(self, tokens: list[Token]) -> None:
        for token in tokens:
            request = self.open[token.key]
            if token.finish_reason == "error":
                del self.open[token.key]
                continue
            outputs = self.outputs[token.key]
            outputs.append(token.token_id)
            expected, finish_reason, stop_reason = expected_outcome(request)
            assert outputs == expected[: len(outputs)]
            is_end = len(outputs) == len(expected)
            assert token.finish_reason == (finish_reason if is_end else None)
            assert token.stop_reason == (stop_reason if is_end else None)
            assert token.prompt_logprobs == (scores_of(request) if len(outputs) == 1 else None)
            if is_end or request.prefill_only:
                del self.open[token.key]

    @invariant()
    def nothing_is_lost(self) -> None:
        load = self.engine.scheduler.load()
        assert load.blocks_active + load.blocks_cached + self.engine.pool.num_free == load.blocks_total

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for key in list(self.reservations):
            self.engine.release(key, 0)
        for _ in range(MAX_STEPS):
            for key in self.prefilled:
                self.engine.release(key, 0)
            if not self.engine.scheduler.has_work():
                break
            self.take(self.engine.step())
        assert not self.open, "requests that never finished"
        assert self.engine.pool.num_active == 0


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40)
