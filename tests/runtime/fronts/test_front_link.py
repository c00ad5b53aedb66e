"""A front's backend and the runtime's session for it, joined by messages in memory: nothing is lost on the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from dynrt.runtime.errors import AskTimeoutError, ContextLengthError, DynrtError, NoWorkerError
from dynrt.runtime.frame_sink import FrameSink
from dynrt.runtime.fronts import backend as front_backend
from dynrt.runtime.fronts.backend import RemoteBackend
from dynrt.runtime.fronts.messages import (
    Failure,
    FromFront,
    Generate,
    Item,
    Items,
    Leave,
    Listening,
    MetricsText,
    MetricsWanted,
    State,
    ToFront,
    decode_from_front,
    decode_to_front,
    encode,
)
from dynrt.runtime.fronts.session import FrontSession
from dynrt.runtime.http_counts import HttpCounts
from dynrt.runtime.messages import Frame, SamplingParams, pack_ids
from dynrt.runtime.offload import InlineOffload
from dynrt.runtime.requests import GenerateOutput, GenerateRequest, ModelCard

FRAME = Frame(b"<", b">")
REQUEST = GenerateRequest(pack_ids([1, 2]), SamplingParams(9), request_id="r", frame=FRAME)
Step = GenerateOutput | tuple[bytes, int] | Exception | asyncio.Event


class ScriptedRuntime:
    """Outputs to yield, (chunk, token id) for the sink, errors to raise, events to wait for."""

    def __init__(self, *script: Step) -> None:
        self.script = script
        self.requests: list[GenerateRequest] = []
        self.closed = asyncio.Event()
        self.http_counts: list[HttpCounts] = []

    async def generate(
        self, request: GenerateRequest, sink: FrameSink | None = None
    ) -> AsyncGenerator[GenerateOutput, None]:
        self.requests.append(request)
        try:
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                elif isinstance(step, GenerateOutput):
                    yield step
                else:
                    assert sink is not None and sink.take(*step)
        finally:
            self.closed.set()

    def count_http(self, counts: HttpCounts) -> None:
        self.http_counts.append(counts)

    def metrics_text(self) -> bytes:
        return b"up 1\n"


class Link:
    """Both ends, and all that went between them. `is_cut`: what the runtime sends is lost."""

    def __init__(self, runtime: ScriptedRuntime) -> None:
        self.is_cut = False
        self.to_front: list[ToFront] = []
        self.to_runtime: list[FromFront] = []
        self.listens = asyncio.Event()
        self.session = FrontSession(runtime, self._send_to_front, self.listens)
        self.front = RemoteBackend(None, InlineOffload(), self._send_to_runtime)  # type: ignore[arg-type]

    def _send_to_front(self, message: ToFront) -> None:
        received = decode_to_front(encode(message))
        self.to_front.append(received)
        assert isinstance(received, State | Items | MetricsText)
        if not self.is_cut:
            self.front.on_message(received)

    def _send_to_runtime(self, message: FromFront) -> None:
        received = decode_from_front(encode(message))
        self.to_runtime.append(received)
        self.session.on_message(received)


class Sink:
    descriptor: int | None = None
    num_tokens = 0
    has_written = False

    def __init__(self, is_open: bool) -> None:
        self.is_open = is_open
        self.taken: list[tuple[bytes, int]] = []

    def take(self, chunk: bytes, token_id: int) -> bool:
        if self.is_open:
            self.taken.append((chunk, token_id))
        return self.is_open

    def write_rest(self, rest: bytes) -> None:
        raise AssertionError("it has no descriptor")


async def outputs_of(link: Link, sink: Sink | None = None) -> list[GenerateOutput]:
    return [output async for output in link.front.generate(REQUEST, sink)]


LAST = GenerateOutput([9], "", "stop", "END", frames=b"<9>", cached_tokens=1)


async def test_outputs_arrive_as_they_were() -> None:
    outputs = [GenerateOutput([1], "a", cached_tokens=2), LAST]
    link = Link(ScriptedRuntime(*outputs))
    assert await outputs_of(link) == outputs
    assert link.session.open_requests == 0
    assert not any(isinstance(message, Leave) for message in link.to_runtime), "it had ended by itself"


@pytest.mark.parametrize("is_open", [True, False])
async def test_events_go_to_the_sink_or_come_out_in_order(is_open: bool) -> None:
    read = asyncio.Event()
    chunks = [(FRAME.chunk("x"), 2), (b"", 3)]
    link = Link(ScriptedRuntime(GenerateOutput([1], ""), read, *chunks, LAST))
    sink = Sink(is_open)
    got: list[GenerateOutput] = []
    async for output in link.front.generate(REQUEST, sink):
        got.append(output)
        asyncio.get_running_loop().call_soon(read.set)
    assert sink.taken == (chunks if is_open else [])
    between = [GenerateOutput([2], "", frames=FRAME.around("x")), GenerateOutput([3], "")]
    assert got == [GenerateOutput([1], ""), *([] if is_open else between), LAST]
    steps = [message for message in link.to_front if isinstance(message, Items)]
    assert [len(step.items) for step in steps] == [1, 3], "what comes in one turn is one message"


async def test_events_never_overtake_what_is_not_read() -> None:
    link = Link(ScriptedRuntime(GenerateOutput([1], ""), (FRAME.chunk("x"), 2), LAST))
    sink = Sink(is_open=True)
    assert [output.token_ids for output in await outputs_of(link, sink)] == [[1], [2], [9]]
    assert sink.taken == []


@pytest.mark.parametrize(
    "error",
    [ContextLengthError("too long", param="prompt"), NoWorkerError("none is up", retry_after_s=7)],
)
async def test_errors_arrive_as_they_were(error: DynrtError) -> None:
    link = Link(ScriptedRuntime(GenerateOutput([1], "a"), error))
    with pytest.raises(type(error)) as raised:
        await outputs_of(link)
    assert vars(raised.value) == vars(error)
    assert not any(isinstance(message, Leave) for message in link.to_runtime)


async def test_a_bug_is_told_without_its_details(caplog: pytest.LogCaptureFixture) -> None:
    link = Link(ScriptedRuntime(ZeroDivisionError("secret")))
    with pytest.raises(DynrtError, match="internal error") as raised:
        await outputs_of(link)
    assert "secret" not in raised.value.message and "secret" in caplog.text


async def test_who_leaves_ends_the_request_in_the_runtime() -> None:
    runtime = ScriptedRuntime(GenerateOutput([1], "a"), asyncio.Event())
    link = Link(runtime)
    async with aclosing(link.front.generate(REQUEST)) as outputs:
        await anext(outputs)
    await runtime.closed.wait()
    assert link.to_runtime == [Generate(0, REQUEST), Leave(0)]
    await link.session.end()
    link.front.on_message(Items([Item(0, b"late", 1)]))  # for nobody


async def test_a_fronts_end_ends_its_requests() -> None:
    runtime = ScriptedRuntime(asyncio.Event())
    link = Link(runtime)
    waiting = asyncio.ensure_future(outputs_of(link))
    while not runtime.requests:  # noqa: ASYNC110 - two turns of the loop
        await asyncio.sleep(0)
    await link.session.end()
    assert runtime.closed.is_set() and link.session.open_requests == 0
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_state_and_metrics() -> None:
    link = Link(ScriptedRuntime())
    assert link.front.models() == [] and link.front.ready() is not None and not link.front.draining()
    card = ModelCard("m", 1, 64, 100)
    link.front.on_message(State([card], None, is_draining=True, is_ending=False))
    assert link.front.models() == [card] and link.front.ready() is None and link.front.draining()
    assert await link.front.metrics() == b"up 1\n"
    assert not link.listens.is_set()
    link.session.on_message(Listening())
    assert link.listens.is_set()


async def test_answers_are_counted_in_the_runtime_and_connections_leave_with_their_front() -> None:
    runtime = ScriptedRuntime()
    link = Link(runtime)
    counts = HttpCounts([(("/v1/models", 200), 3)], connections=2)
    link.front.count_http(counts)
    link.front.count_http(HttpCounts([], connections=-1))
    await link.session.end()
    assert runtime.http_counts == [counts, HttpCounts([], -1), HttpCounts([], -1)]


async def test_metrics_have_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_backend, "METRICS_TIMEOUT_S", 0.01)
    link = Link(ScriptedRuntime())
    link.is_cut = True
    with pytest.raises(AskTimeoutError):
        await link.front.metrics()
    [wanted] = link.to_runtime
    assert isinstance(wanted, MetricsWanted)
    link.front.on_message(MetricsText(wanted.number, b"late"))


def test_every_error_can_travel() -> None:
    for kind in (ContextLengthError, NoWorkerError, DynrtError):
        assert type(Failure.of(kind("x")).error()) is kind
