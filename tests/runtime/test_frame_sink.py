"""Events that go past a request's reader: only behind what it has read, never lost, known when the request moves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from test_request_life import KEY, LOCAL, PROMPT, REMOTE, ScriptedDispatcher, read

from dynrt.runtime.attempt import Arrival, Attempt, AttemptError
from dynrt.runtime.messages import (
    FinishReason,
    Frame,
    SamplingParams,
    StepTiming,
    Submit,
    TextDelta,
    TokenDelta,
    pack_ids,
)
from dynrt.runtime.passage import pass_on
from dynrt.runtime.requests import GenerateOutput, GenerateRequest

FRAME = Frame(b"<", b">")
TIMING = StepTiming(0.1, 1.0, 1, 0, 0, 0)


class Sink:
    def __init__(self) -> None:
        self.is_open = True
        self.taken: list[bytes] = []

    def take(self, frames: bytes, token_id: int) -> bool:
        assert frames == FRAME.around(chr(token_id))
        if self.is_open:
            self.taken.append(frames)
        return self.is_open


def delta(
    attempt: Attempt, token_id: int, finish: FinishReason | None = None, cached: int | None = None
) -> TokenDelta | TextDelta:
    text = TextDelta(KEY, attempt.epoch, token_id, FRAME.around(chr(token_id)), 1)
    if finish is None and cached is None:
        return text
    return msgspec.structs.replace(text.whole(), finish_reason=finish, cached_tokens=cached)


def say(attempt: Attempt, told: TokenDelta | TextDelta, sender: str = "") -> None:
    """As Attempts.step does."""
    texts, deltas = ([told], []) if isinstance(told, TextDelta) else ([], [told])
    unread, _ = pass_on({KEY: attempt.passage}, texts, TIMING.ended_at)
    for one in unread + deltas:
        attempt.arrive(Arrival(one, sender or attempt.decode, TIMING))


def outputs_of(dispatcher: ScriptedDispatcher, sink: Sink) -> AsyncGenerator[GenerateOutput, None]:
    return read(dispatcher, GenerateRequest(PROMPT, SamplingParams(9), frame=FRAME), sink)


async def test_the_first_and_the_last_are_read_and_those_between_taken() -> None:
    sink, dispatcher = Sink(), ScriptedDispatcher([LOCAL], [lambda attempt: say(attempt, delta(attempt, 65))])
    async with aclosing(outputs_of(dispatcher, sink)) as outputs:
        assert (await anext(outputs)).frames == b'<"A">'
        [attempt] = dispatcher.opened
        say(attempt, delta(attempt, 66))
        assert sink.taken == [], "nobody waits for news yet: it must come behind what is being dealt with"
        assert (await anext(outputs)).frames == b'<"B">'
        waiting = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        say(attempt, delta(attempt, 67))
        say(attempt, delta(attempt, 68))
        assert sink.taken == [b'<"C">', b'<"D">'] and not waiting.done()
        say(attempt, delta(attempt, 69, "length"))
        last = await waiting
        assert (last.frames, last.token_ids, last.finish_reason) == (b'<"E">', [69], "length")


async def test_what_a_sink_does_not_take_is_read_in_order() -> None:
    sink, dispatcher = Sink(), ScriptedDispatcher([LOCAL], [lambda attempt: say(attempt, delta(attempt, 65))])
    async with aclosing(outputs_of(dispatcher, sink)) as outputs:
        await anext(outputs)
        waiting = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        [attempt] = dispatcher.opened
        sink.is_open = False
        say(attempt, delta(attempt, 66))
        sink.is_open = True
        say(attempt, delta(attempt, 67))
        assert sink.taken == [], "what waits to be read comes first"
        assert (await waiting).frames == b'<"B"><"C">'


async def test_a_request_goes_on_elsewhere_behind_what_was_taken() -> None:
    moved = asyncio.Event()
    scripts = [lambda attempt: say(attempt, delta(attempt, 65)), lambda attempt: moved.set()]
    sink, dispatcher = Sink(), ScriptedDispatcher([LOCAL, LOCAL], scripts)
    async with aclosing(outputs_of(dispatcher, sink)) as outputs:
        await anext(outputs)
        waiting = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        attempt = dispatcher.opened[0]
        say(attempt, delta(attempt, 66))
        attempt.fail(AttemptError("lost"))
        await moved.wait()
        submit = dispatcher.told[-1][1]
        assert isinstance(submit, Submit)
        assert (submit.output_ids, submit.chars_emitted, submit.frame) == (pack_ids([65, 66]), 2, FRAME)
        waiting.cancel()
        await asyncio.wait([waiting])


async def test_decodes_first_token_is_read_as_it_tells_when_decode_began() -> None:
    prefills = [lambda attempt: say(attempt, delta(attempt, 65, cached=0), "p1")]
    sink, dispatcher = Sink(), ScriptedDispatcher([REMOTE], prefills)
    async with aclosing(outputs_of(dispatcher, sink)) as outputs:
        await anext(outputs)
        waiting = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        [attempt] = dispatcher.opened
        say(attempt, delta(attempt, 66))
        assert (await waiting).frames == b'<"B">' and attempt.times.first_step == TIMING
        waiting = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0)
        say(attempt, delta(attempt, 67))
        assert sink.taken == [b'<"C">']
        waiting.cancel()
        await asyncio.wait([waiting])
