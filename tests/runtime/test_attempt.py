"""One attempt: arrivals and failures are read in order, and a loss counts only where it matters."""

from __future__ import annotations

import asyncio

import pytest

from dynrt.runtime.attempt import Arrival, Attempt, AttemptError
from dynrt.runtime.errors import DynrtError, EngineError, InvalidRequestError
from dynrt.runtime.messages import (
    FinishReason,
    SamplingParams,
    StepTiming,
    Submit,
    TextDelta,
    TokenDelta,
    pack_ids,
)
from dynrt.runtime.passage import pass_on
from dynrt.transfer.events import FirstToken

KEY = bytes(16)


def remote() -> Attempt:
    return Attempt(KEY, 3, "p", "d", chars_sent=10)


def arrival(
    token_id: int,
    sender: str,
    text: str = "",
    finish: FinishReason | None = None,
    ended_at: float | None = None,
) -> Arrival:
    timing = None if ended_at is None else StepTiming(0.1, ended_at, 1, 0, 0, 0)
    return Arrival(TokenDelta(KEY, 3, [token_id], text, finish), sender, timing)


async def test_slow_reader_gets_all_at_once() -> None:
    attempt = remote()
    arrivals = [arrival(number, "d") for number in range(3)]
    for one in arrivals:
        attempt.arrive(one)
    assert await attempt.read() == arrivals
    reader = asyncio.create_task(attempt.read())
    await asyncio.sleep(0)
    assert not reader.done()
    attempt.arrive(arrivals[0])
    assert await reader == [arrivals[0]]


async def test_failure_is_read_after_what_came_before() -> None:
    attempt = remote()
    attempt.arrive(arrival(1, "p"))
    attempt.fail(AttemptError("first"))
    attempt.fail(AttemptError("second"))
    assert len(await attempt.read()) == 1
    with pytest.raises(AttemptError, match="first"):
        await attempt.read()


@pytest.mark.parametrize(("is_refusal", "kind"), [(False, EngineError), (True, InvalidRequestError)])
async def test_engine_error_is_raised_as_whose_fault_it_is(is_refusal: bool, kind: type[DynrtError]) -> None:
    attempt = remote()
    failed = TokenDelta(KEY, 3, [], "", "error", error="no memory", is_refusal=is_refusal)
    attempt.arrive(Arrival(failed, "d", None))
    with pytest.raises(kind, match="no memory"):
        await attempt.read()


def test_first_token_of_prefill_goes_to_decode() -> None:
    attempt = remote()
    assert attempt.first_token(arrival(7, "p", "abc")) == FirstToken(KEY, 3, 7, chars_emitted=13)
    assert attempt.first_token(arrival(7, "d", "abc")) is None
    assert attempt.first_token(arrival(7, "p", "abc", "length")) is None, "it was the last token too"
    local = Attempt(KEY, 3, "d", "d", 0)
    assert local.first_token(arrival(7, "d")) is None
    assert remote().is_remote and not local.is_remote


def test_times_are_those_of_each_worker_s_step() -> None:
    attempt = remote()
    attempt.arrive(arrival(1, "p", ended_at=5.0))
    attempt.arrive(arrival(2, "d", ended_at=6.0))
    attempt.arrive(arrival(3, "d", ended_at=7.0))
    assert attempt.times.computed_at == 5.0
    assert attempt.times.first_step is not None and attempt.times.first_step.ended_at == 6.0
    assert attempt.has_begun


def test_a_decode_worker_that_samples_is_told_no_token_and_its_client_is_told_what_prefill_knows() -> None:
    attempt = Attempt(KEY, 3, "p", "d", 10, first_token_from="decode")
    from_prefill = Arrival(TokenDelta(KEY, 3, [7], "abc", "length", cached_tokens=5), "p", None)
    assert attempt.arrive(from_prefill) == 0 and attempt.first_token(from_prefill) is None
    assert attempt.computes(from_prefill) and attempt.has_begun
    from_decode = Arrival(TokenDelta(KEY, 3, [8], "d", cached_tokens=30), "d", None)
    assert attempt.arrive(from_decode) == attempt.arrive(from_decode) == 1
    first, second = [one.delta for one in attempt._arrivals]
    assert (first.token_ids, first.cached_tokens, second.cached_tokens) == ([8], 5, None)


async def test_decodes_tokens_wait_for_what_prefill_tells_of_the_prompt() -> None:
    attempt = Attempt(KEY, 3, "p", "d", 10, first_token_from="decode")
    assert attempt.arrive(arrival(7, "d")) == attempt.arrive(arrival(8, "d")) == 1
    reader = asyncio.create_task(attempt.read())
    await asyncio.sleep(0)
    attempt.passage.attempt_id = attempt.id
    text = TextDelta(5, 9, b"", 0)
    assert pass_on({5: attempt.passage}, [text], 1.0) == ([text.whole(KEY, 3)], []) and not reader.done()
    attempt.arrive(Arrival(TokenDelta(KEY, 3, [7], cached_tokens=5, text=""), "p", None))
    first, second = [one.delta for one in await reader]
    assert (first.token_ids, first.cached_tokens) == ([7], 5)
    assert (second.token_ids, second.cached_tokens) == ([8], None)
    attempt.arrive(arrival(9, "d"))
    assert [one.delta.token_ids for one in await attempt.read()] == [[9]]


async def test_decodes_tokens_do_not_wait_for_a_prefill_worker_that_is_lost() -> None:
    attempt = Attempt(KEY, 3, "p", "d", 10, first_token_from="decode")
    attempt.arrive(arrival(7, "d"))
    attempt.worker_lost("p", "it was killed")
    assert [one.delta.token_ids for one in await attempt.read()] == [[7]]


async def test_a_decode_worker_lost_meanwhile_does_not_tell_what_was_handed_to_it_as_cached() -> None:
    attempt = Attempt(KEY, 3, "p", "d", 10, first_token_from="decode")
    attempt.arrive(Arrival(TokenDelta(KEY, 3, [7], "", cached_tokens=30), "d", None))
    attempt.worker_lost("d", "it was killed")
    assert [(one.delta.token_ids, one.delta.cached_tokens) for one in await attempt.read()] == [([7], None)]


def pulling() -> Attempt:
    attempt = Attempt(KEY, 3, "p", "d", 10, first_token_from="decode")
    prompt_ids, sampling = pack_ids(range(32)), SamplingParams(max_tokens=4)
    attempt.pull = Submit(KEY, 3, "generate", prompt_ids, sampling, output_ids=pack_ids([7]))
    return attempt


def test_decode_is_told_where_the_computed_prompt_waits() -> None:
    attempt = pulling()
    assert attempt.is_remote and not attempt.is_pushed
    from_prefill = Arrival(TokenDelta(KEY, 3, [7], "", kv_transfer_params=b"there"), "p", None)
    attempt.arrive(from_prefill)
    pull = attempt.pull_behind(from_prefill)
    assert pull is not None and (pull.purpose, pull.kv_transfer_params) == ("generate", b"there")
    assert attempt.pull_behind(arrival(8, "d")) is None
    failed = Arrival(TokenDelta(KEY, 3, [], "", "error", error="no memory"), "p", None)
    attempt.arrive(failed)
    assert attempt.pull_behind(failed) is None


@pytest.mark.parametrize(("found", "was_pulled"), [(32, True), (31, False), (0, False), (None, None)])
def test_decode_says_by_what_it_found_whether_all_kv_came(found: int | None, was_pulled: bool | None) -> None:
    delta = TokenDelta(KEY, 3, [8], "", cached_tokens=found)
    assert pulling().was_pulled(Arrival(delta, "d", None)) is was_pulled
    assert pulling().was_pulled(Arrival(delta, "p", None)) is None
    assert remote().was_pulled(Arrival(delta, "d", None)) is None


async def test_prefill_lost_is_a_failure_until_decode_has_what_it_pulls() -> None:
    attempt = pulling()
    attempt.arrive(arrival(7, "p"))
    attempt.worker_lost("p", "it died")
    with pytest.raises(AttemptError, match="prefill worker was lost"):
        await attempt.read()
    begun = pulling()
    begun.arrive(arrival(7, "p"))
    begun.arrive(arrival(8, "d", ended_at=2.0))
    begun.worker_lost("p", "it died")
    assert [one.delta.token_ids for one in await begun.read()] == [[8]]


def test_a_prefill_worker_that_decodes_on_does_not_count_its_own_prompt_as_cached() -> None:
    held = Attempt(KEY, 3, "p", "d", 10, first_token_from="decode")
    held.arrive(Arrival(TokenDelta(KEY, 3, [7], "abc", cached_tokens=5), "p", None))
    stays = Attempt(KEY, 4, "p", "p", 10)
    stays.inherit(held)
    for _ in range(2):
        stays.arrive(Arrival(TokenDelta(KEY, 4, [8], "d", cached_tokens=30), "p", None))
    assert stays._arrivals[0].delta.cached_tokens == 5


def test_a_moved_attempt_knows_what_prefill_sampled() -> None:
    attempt = remote()
    attempt.first_token(arrival(7, "p", "abc"))
    moved = attempt.moved(5, "d2", 9)
    assert moved.sampled == FirstToken(KEY, 5, 7, chars_emitted=13)
    assert (moved.id, moved.prefill, moved.decode, moved.chars_sent) == ((KEY, 5), "p", "d2", 10)
    assert moved.has_begun, "a prefill worker that dies now is the handoff's affair"


async def test_decode_lost_is_a_failure_at_any_time() -> None:
    for has_begun in (False, True):
        attempt = remote()
        if has_begun:
            attempt.arrive(arrival(1, "p"))
            await attempt.read()
        attempt.worker_lost("d", "it died")
        with pytest.raises(AttemptError, match="decode worker was lost: it died") as failure:
            await attempt.read()
        assert failure.value.lost == "d"


async def test_prefill_lost_is_a_failure_before_the_first_token_only() -> None:
    attempt = remote()
    attempt.worker_lost("someone", "else")
    attempt.worker_lost("p", "it died")
    with pytest.raises(AttemptError, match="prefill worker was lost") as failure:
        await attempt.read()
    assert failure.value.lost == "p"
    begun = remote()
    begun.arrive(arrival(1, "p"))
    await begun.read()
    begun.worker_lost("p", "it died")
    begun.arrive(arrival(2, "d"))
    assert [one.delta.token_ids for one in await begun.read()] == [[2]]
