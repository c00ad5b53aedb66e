"""The life of a request over a scripted dispatcher: what it submits, how it moves on, and that it always ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest

from dynrt.runtime.attempt import Arrival, Attempt, AttemptError, NoRoomError
from dynrt.runtime.errors import DynrtError, EngineError, NoWorkerError, OverloadedError, WorkerLostError
from dynrt.runtime.frame_sink import FrameSink
from dynrt.runtime.messages import (
    FinishReason,
    SamplingParams,
    StepTiming,
    Submit,
    ToEngine,
    TokenDelta,
    pack_ids,
    unpack_ids,
)
from dynrt.runtime.request_life import RequestLife, Route
from dynrt.runtime.requests import GenerateOutput, GenerateRequest

KEY = bytes(range(16))
PROMPT = pack_ids([5, 6, 7])
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
Script = Callable[[Attempt], None]  # what the workers say to one attempt


def says(*tokens: tuple[int, str], finish: FinishReason | None = None, cached: int | None = None) -> Script:
    """These tokens with their texts, the first from prefill; the last has the finish reason."""

    def play(attempt: Attempt) -> None:
        for number, (token_id, text) in enumerate(tokens):
            is_last = number == len(tokens) - 1
            delta = TokenDelta(
                KEY,
                attempt.epoch,
                [token_id],
                text,
                finish if is_last else None,
                cached_tokens=cached if not number else None,
            )
            attempt.arrive(Arrival(delta, attempt.decode if number else attempt.prefill, None))

    return play


def then(script: Script, failure: AttemptError | DynrtError) -> Script:
    def play(attempt: Attempt) -> None:
        script(attempt)
        attempt.fail(failure)

    return play


class ScriptedDispatcher:
    """Routes in turn (an error: there is none), and a script for each attempt; notes what it is asked."""

    def __init__(self, routes: list[Route | DynrtError], scripts: list[Script]) -> None:
        self._routes = routes
        self._scripts = scripts
        self.num_attempts = 0
        self.excluded: list[frozenset[str]] = []
        self.known: list[bytes] = []
        self.told: list[tuple[str, ToEngine]] = []
        self.opened: list[Attempt] = []
        self.closed: list[tuple[int, bool, str]] = []
        self.prompts: list[tuple[int, int]] = []
        self.waits_s: list[float] = []

    def new_number(self) -> int:
        self.num_attempts += 1
        return self.num_attempts

    async def plan(self, life: RequestLife, exclude: frozenset[str]) -> Route:
        self.excluded.append(exclude)
        self.known.append(life.known_ids)
        route = self._routes.pop(0)
        if isinstance(route, NoWorkerError):
            raise route
        return route

    async def plan_move(self, life: RequestLife, held: Attempt, tried: frozenset[str]) -> Route:
        self.excluded.append(tried)
        route = self._routes.pop(0)
        if isinstance(route, DynrtError):
            raise route
        return route

    def move_attempt(self, held: Attempt, attempt: Attempt) -> None:
        self.opened.append(attempt)

    async def wait_for_change(self, timeout_s: float) -> None:
        self.waits_s.append(timeout_s)
        await asyncio.sleep(0)

    def tell(self, incarnation: str, message: ToEngine) -> None:
        self.told.append((incarnation, message))
        if incarnation == self.opened[-1].decode:
            self._scripts.pop(0)(self.opened[-1])

    def open_attempt(self, attempt: Attempt) -> None:
        self.opened.append(attempt)

    def close_attempt(self, attempt: Attempt, finished: bool, reason: str) -> None:
        self.closed.append((attempt.epoch, finished, reason))

    def prompt_seen(self, num_tokens: int, cached_tokens: int) -> None:
        self.prompts.append((num_tokens, cached_tokens))


REMOTE, LOCAL = Route("p1", "d1"), Route("d2", "d2")
NOBODY = NoWorkerError("no worker is up")


REQUEST = GenerateRequest(PROMPT, SamplingParams(4), salt="tenant", request_id="r", traceparent=TRACEPARENT)


async def read(
    dispatcher: ScriptedDispatcher,
    request: GenerateRequest = REQUEST,
    sink: FrameSink | None = None,
    *,
    max_attempts: int = 3,
    wait_s: float = 1.0,
) -> AsyncGenerator[GenerateOutput, None]:
    """As Runtime.generate does."""
    life = RequestLife(
        KEY,
        request,
        request.sampling,
        "auto",
        dispatcher,
        sink,
        began_at=0.0,
        max_attempts=max_attempts,
        no_worker_wait_s=wait_s,
    )
    try:
        while life.finish_reason is None:
            yield await life.next()
    finally:
        life.close()


async def outputs_of(
    dispatcher: ScriptedDispatcher, max_attempts: int = 3, wait_s: float = 1.0
) -> list[GenerateOutput]:
    return [output async for output in read(dispatcher, max_attempts=max_attempts, wait_s=wait_s)]


def joined(outputs: list[GenerateOutput]) -> tuple[list[int], str]:
    return [token for output in outputs for token in output.token_ids], "".join(
        output.text for output in outputs
    )


async def test_remote_request_goes_to_both_at_once() -> None:
    dispatcher = ScriptedDispatcher([REMOTE], [says((1, "a"), (2, "b"), finish="length", cached=2)])
    outputs = await outputs_of(dispatcher)
    assert joined(outputs) == ([1, 2], "ab")
    assert (outputs[-1].finish_reason, outputs[-1].cached_tokens) == ("length", 2)
    assert [
        (to, message.purpose, message.peer) for to, message in dispatcher.told if isinstance(message, Submit)
    ] == [
        ("d1", "reserve", "p1"),
        ("p1", "prefill", "p1"),
    ]
    assert {message.traceparent for _, message in dispatcher.told if isinstance(message, Submit)} == {
        TRACEPARENT
    }
    assert [closed[:2] for closed in dispatcher.closed] == [(0, True)]
    assert dispatcher.prompts == [(3, 2)]


async def test_where_decode_pulls_only_prefill_is_told_at_first() -> None:
    route = Route("p1", "d1", "decode", "nixl-pull")
    dispatcher = ScriptedDispatcher([route], [])
    outputs = read(dispatcher)
    first = asyncio.create_task(anext(outputs))
    await asyncio.sleep(0)
    ((to, submit),) = dispatcher.told
    assert isinstance(submit, Submit) and (to, submit.purpose) == ("p1", "prefill")
    (attempt,) = dispatcher.opened
    assert attempt.pull is not None and attempt.pull.purpose == "generate"
    says((1, "a"), (2, "b"), finish="length")(attempt)
    assert joined([await first]) == ([2], "b"), "nobody reads what prefill sampled"
    await outputs.aclose()


async def test_local_request_goes_to_one() -> None:
    dispatcher = ScriptedDispatcher([LOCAL], [says((1, "a"), finish="stop")])
    assert joined(await outputs_of(dispatcher)) == ([1], "a")
    ((to, submit),) = dispatcher.told
    assert isinstance(submit, Submit)
    assert (to, submit.purpose, submit.prompt_ids, submit.salt, submit.peer) == (
        "d2",
        "generate",
        PROMPT,
        "tenant",
        "",
    )


async def test_it_goes_on_elsewhere_behind_what_was_sent() -> None:
    lost = AttemptError("its decode worker was lost", "d1")
    dispatcher = ScriptedDispatcher(
        [REMOTE, LOCAL],
        [
            then(says((1, "a"), (2, "bcd"), cached=0), lost),
            says((3, "e"), (4, ""), finish="length", cached=3),
        ],
    )
    outputs = await outputs_of(dispatcher)
    assert joined(outputs) == ([1, 2, 3, 4], "abcde")
    submit = dispatcher.told[-1][1]
    assert isinstance(submit, Submit)
    assert (submit.epoch, submit.output_ids, submit.chars_emitted) == (1, pack_ids([1, 2]), 4)
    assert submit.sampling.max_tokens == 4, "counted from the first token, wherever it was made"
    assert dispatcher.known == [PROMPT, PROMPT + pack_ids([1, 2])]
    assert dispatcher.excluded == [frozenset(), frozenset({"d1"})]
    assert [closed[:2] for closed in dispatcher.closed] == [(0, False), (1, True)]
    assert dispatcher.prompts == [(3, 0)], "the prompt is counted once"


async def test_failed_handoff_excludes_nobody() -> None:
    failed = AttemptError("its handoff failed")
    dispatcher = ScriptedDispatcher([REMOTE, REMOTE], [then(says(), failed), says((1, "a"), finish="length")])
    assert joined(await outputs_of(dispatcher)) == ([1], "a")
    assert dispatcher.excluded == [frozenset(), frozenset()]


async def test_attempts_have_a_limit() -> None:
    lost = AttemptError("its decode worker was lost", "d1")
    dispatcher = ScriptedDispatcher([REMOTE] * 2, [then(says(), lost)] * 2)
    with pytest.raises(WorkerLostError, match="gave up after 2 attempts: its decode worker was lost"):
        await outputs_of(dispatcher, max_attempts=2)
    assert [closed[:2] for closed in dispatcher.closed] == [(0, False), (1, False)]


async def test_engine_error_is_not_tried_again() -> None:
    dispatcher = ScriptedDispatcher([REMOTE], [then(says(), EngineError("bad"))])
    with pytest.raises(EngineError, match="bad"):
        await outputs_of(dispatcher)
    assert [closed[:2] for closed in dispatcher.closed] == [(0, False)]


async def test_reader_that_stops_early_ends_the_attempt() -> None:
    dispatcher = ScriptedDispatcher([REMOTE], [says((1, "a"))])
    async with aclosing(read(dispatcher)) as outputs:
        await anext(outputs)
    assert dispatcher.closed == [(0, False, "the client left")]


async def test_cancelled_reader_ends_the_attempt() -> None:
    dispatcher = ScriptedDispatcher([REMOTE], [says((1, "a"))])
    reader = asyncio.create_task(outputs_of(dispatcher))
    for _ in range(5):
        await asyncio.sleep(0)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert dispatcher.closed == [(0, False, "the client left")]


async def test_it_waits_for_a_worker_to_come() -> None:
    dispatcher = ScriptedDispatcher([NOBODY, NOBODY, REMOTE], [says((1, "a"), finish="length")])
    assert joined(await outputs_of(dispatcher, wait_s=60.0)) == ([1], "a")
    assert len(dispatcher.waits_s) == 2
    assert 0.0 < dispatcher.waits_s[1] <= dispatcher.waits_s[0] <= 60.0


async def test_it_does_not_wait_for_ever() -> None:
    dispatcher = ScriptedDispatcher([NOBODY], [])
    with pytest.raises(NoWorkerError):
        await outputs_of(dispatcher, wait_s=0.0)
    assert dispatcher.closed == [], "nothing was opened"


def finds_no_room(attempt: Attempt) -> None:
    """Prefill has said its token, decode nothing."""
    attempt.arrive(Arrival(TokenDelta(KEY, attempt.epoch, [1], "a"), attempt.prefill, None))
    attempt.no_room("full")


def goes_on(attempt: Attempt) -> None:
    attempt.arrive(Arrival(TokenDelta(KEY, attempt.epoch, [2], "b", "length"), attempt.decode, None))


def submits(dispatcher: ScriptedDispatcher) -> list[tuple[str, str, int, list[int], int]]:
    """To whom, for what, of which epoch, behind which tokens and characters."""
    return [
        (to, submit.purpose, submit.epoch, unpack_ids(submit.output_ids), submit.chars_emitted)
        for to, submit in dispatcher.told
        if isinstance(submit, Submit)
    ]


async def test_a_finished_prompt_without_room_is_reserved_for_elsewhere() -> None:
    """As it was computed: behind it comes the token that the client has."""
    dispatcher = ScriptedDispatcher([REMOTE, Route("p1", "d2")], [finds_no_room, goes_on])
    assert joined(await outputs_of(dispatcher)) == ([1, 2], "ab")
    assert submits(dispatcher)[2:] == [("d2", "reserve", 1, [], 0)]
    assert dispatcher.excluded[1] == {"d1"}
    assert [closed[:2] for closed in dispatcher.closed] == [(1, True)], "the first one was not given up"


async def test_it_is_tried_on_each_decode_worker_and_then_stays_on_prefill() -> None:
    routes = [REMOTE, Route("p1", "d2"), Route("p1", "p1")]
    dispatcher = ScriptedDispatcher(routes, [finds_no_room, lambda attempt: attempt.no_room("full"), goes_on])
    assert joined(await outputs_of(dispatcher)) == ([1, 2], "ab")
    assert submits(dispatcher)[3:] == [("p1", "generate", 2, [1], 1)]
    assert dispatcher.excluded[2] == {"d1", "d2"}


async def test_with_room_nowhere_it_is_turned_away() -> None:
    full = OverloadedError("no decode worker has room", retry_after_s=3)
    dispatcher = ScriptedDispatcher([REMOTE, full], [finds_no_room])
    with pytest.raises(OverloadedError, match="no decode worker has room"):
        await outputs_of(dispatcher)
    assert [closed[:2] for closed in dispatcher.closed] == [(0, False)]


async def test_decode_that_has_begun_is_not_moved() -> None:
    """What it has said may be read already: only a new attempt knows from where to go on."""

    def begins_all_the_same(attempt: Attempt) -> None:
        finds_no_room(attempt)
        attempt.arrive(Arrival(TokenDelta(KEY, attempt.epoch, [7], "late"), attempt.decode, None))

    dispatcher = ScriptedDispatcher([REMOTE, Route("p1", "d2")], [begins_all_the_same, goes_on])
    assert joined(await outputs_of(dispatcher)) == ([1, 2], "ab"), "nothing is heard of it any more"
    attempt = Attempt(KEY, 0, "p", "d", 0)
    attempt.arrive(Arrival(TokenDelta(KEY, 0, [1], "a"), "p", None))
    attempt.arrive(Arrival(TokenDelta(KEY, 0, [2], "b"), "d", StepTiming(0.1, 1.0, 0, 0, 1, 1)))
    attempt.no_room("full")
    assert len(await attempt.read()) == 2
    with pytest.raises(AttemptError) as failure:
        await attempt.read()
    assert not isinstance(failure.value, NoRoomError)
