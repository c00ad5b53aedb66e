"""Events that go past a request's reader: only behind what it has read, never lost, known when the request moves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from test_request_life import LOCAL, PROMPT, REMOTE, ScriptedDispatcher, read

from dynrt.runtime.attempt import Arrival, Attempt, AttemptError
from dynrt.runtime.chunks import data_of
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
from dynrt.runtime.passage import Passage, pass_on
from dynrt.runtime.requests import GenerateOutput, GenerateRequest

FRAME = Frame(b"<", b">")
TIMING = StepTiming(0.1, 1.0, 1, 0, 0, 0)


class Sink:
    descriptor: int | None = None
    num_tokens = 0
    has_written = False

    def __init__(self) -> None:
        self.is_open = True
        self.taken: list[bytes] = []

    def take(self, chunk: bytes, token_id: int) -> bool:
        assert chunk == FRAME.chunk(chr(token_id))
        if self.is_open:
            self.taken.append(data_of(chunk))
        return self.is_open

    def write_rest(self, rest: bytes) -> None:
        raise AssertionError("it has no descriptor")


def delta(
    attempt: Attempt, token_id: int, finish: FinishReason | None = None, cached: int | None = None
) -> TokenDelta | TextDelta:
    text = TextDelta(attempt.number, token_id, FRAME.chunk(chr(token_id)), 1)
    if finish is None and cached is None:
        return text
    return msgspec.structs.replace(text.whole(*attempt.id), finish_reason=finish, cached_tokens=cached)


def say(attempt: Attempt, told: TokenDelta | TextDelta, sender: str = "") -> None:
    """As Attempts.step does."""
    texts, deltas = ([told], []) if isinstance(told, TextDelta) else ([], [told])
    attempt.passage.attempt_id = attempt.id
    unread, _ = pass_on({attempt.number: attempt.passage}, texts, TIMING.ended_at)
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


def test_what_has_a_descriptor_is_written_there() -> None:
    reader, writer = os.pipe()
    sinks = [Sink(), Sink()]
    sinks[0].descriptor = writer
    passages = {number: Passage(0.0, sink) for number, sink in enumerate(sinks)}
    for passage in passages.values():
        passage.open()
    texts = [[TextDelta(number, 65, FRAME.chunk("A"), 1) for number in passages], [TextDelta(0, 66, b"", 0)]]
    with os.fdopen(reader, "rb") as pipe, os.fdopen(writer, "wb"):
        for at, step in enumerate(texts, start=1):
            assert pass_on(passages, step, float(at)) == ([], [float(at - 1)] * len(step))
        assert (pipe.read1(), sinks[1].taken) == (FRAME.chunk("A"), [FRAME.around("A")])
    assert (sinks[0].num_tokens, sinks[0].has_written) == (2, True)
    assert (list(passages[0].output_ids), passages[0].chars_sent) == ([65, 66], 1)
