"""The access log: one event per request, without prompts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import aiohttp
import pytest
from scripted_backend import DEADLINE_S, ScriptedBackend, chat, http_request, text

from dynrt.runtime.errors import EngineError
from dynrt.runtime.requests import GenerateOutput

FIELDS = (
    "method", "path", "status", "outcome", "duration_s", "prompt_tokens", "output_tokens", "request",
)  # fmt: skip
OPTIONAL_FIELDS = ("ttft_s", "trace_id")
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


class Lines(logging.Handler):
    """Collects the lines of `dynrt.http` and lets a test wait for the next one."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: asyncio.Queue[dict] = asyncio.Queue()

    def emit(self, record: logging.LogRecord) -> None:
        assert record.getMessage() == "request"
        told = vars(record)
        self._lines.put_nowait({name: told[name] for name in (*FIELDS, *OPTIONAL_FIELDS) if name in told})

    async def next(self) -> dict:
        async with asyncio.timeout(DEADLINE_S):
            return await self._lines.get()

    def none_left(self) -> bool:
        return self._lines.empty()


@pytest.fixture
async def lines() -> Iterator[Lines]:
    logger, lines = logging.getLogger("dynrt.http"), Lines()
    level = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(level)


async def test_an_answer(client: aiohttp.ClientSession, lines: Lines) -> None:
    for stream in (False, True):
        body = chat("tell me", stream=stream)
        async with client.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "r1"}) as response:
            await response.read()
        line = await lines.next()
        assert line.pop("duration_s") >= line.pop("ttft_s") >= 0
        assert line == {
            "method": "POST", "path": "/v1/chat/completions", "status": 200, "outcome": "answered",
            "prompt_tokens": 7, "output_tokens": 4, "request": "r1",
        }  # fmt: skip


async def test_a_refusal(client: aiohttp.ClientSession, lines: Lines) -> None:
    await client.post("/v1/completions?key=secret", json={"prompt": ""})
    line = await lines.next()
    assert (line["status"], line["outcome"], line["path"]) == (400, "failed", "/v1/completions")


async def test_a_refusal_by_the_headers_alone(connect, lines: Lines) -> None:
    connection = await connect()
    connection.send(
        http_request("/v1/completions", text(), "Expect: 100-continue", content_type="text/plain")
    )
    assert (await connection.response())[0] == 415
    line = await lines.next()
    assert (line["status"], line["outcome"], line["path"]) == (415, "failed", "/v1/completions")
    assert lines.none_left()


async def test_a_stream_that_fails(
    client: aiohttp.ClientSession, lines: Lines, backend: ScriptedBackend
) -> None:
    backend.script = [GenerateOutput([1], "a"), EngineError("boom")]
    async with client.post("/v1/completions", json=text(stream=True)) as response:
        await response.read()
    line = await lines.next()
    assert (line["status"], line["outcome"], line["output_tokens"]) == (200, "failed", 1)


async def test_a_client_that_left(connect, lines: Lines, backend: ScriptedBackend) -> None:
    backend.script = [asyncio.Event()]
    connection = await connect()
    connection.send(http_request("/v1/completions", text()))
    async with asyncio.timeout(DEADLINE_S):
        await backend.entered.wait()
    connection.abort()
    line = await lines.next()
    assert (line["status"], line["outcome"]) == (499, "client_left")


async def test_a_client_that_closes_behind_the_last_event_was_answered(
    connect, lines: Lines, backend: ScriptedBackend
) -> None:
    backend.may_close.clear()
    connection = await connect()
    connection.send(http_request("/v1/completions", text(stream=True)))
    await connection.until(b"[DONE]\n\n")
    connection.abort()
    line = await lines.next()
    assert (line["status"], line["outcome"]) == (200, "answered")


async def test_probes_are_not_logged(client: aiohttp.ClientSession, lines: Lines) -> None:
    for path in ("/health", "/live", "/ready", "/metrics", "/version"):
        await client.get(path)
    assert (await lines.next())["path"] == "/version"
    assert lines.none_left()


@pytest.mark.parametrize(
    ("traceparent", "trace_id"),
    [
        (f"00-{TRACE_ID}-b7ad6b7169203331-01", TRACE_ID),
        (f"ff-{TRACE_ID}-b7ad6b7169203331-01", None),
        (f"00-{'0' * 32}-b7ad6b7169203331-01", None),
        (f"00-{TRACE_ID}-{'0' * 16}-01", None),
        (f"00-{TRACE_ID.upper()}-b7ad6b7169203331-01", None),
        ("", None),
    ],
)
async def test_the_trace_of_a_request_is_told(
    client: aiohttp.ClientSession, lines: Lines, traceparent: str, trace_id: str | None
) -> None:
    await client.post("/v1/completions", json=text(), headers={"traceparent": traceparent})
    assert (await lines.next()).get("trace_id") == trace_id


async def test_requests_of_one_trace_are_told_apart(client: aiohttp.ClientSession, lines: Lines) -> None:
    ids = []
    for _ in range(2):
        headers = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
        async with client.post("/v1/completions", json=text(), headers=headers) as response:
            ids.append(response.headers["X-Request-Id"])
        assert (await lines.next())["request"] == ids[-1]
    assert ids[0] != ids[1] and TRACE_ID not in "".join(ids)


async def test_answers_are_counted_by_route_and_status_and_connections(
    client: aiohttp.ClientSession, connect, backend: ScriptedBackend
) -> None:
    for path in ("/v1/models/acme/tiny", "/v1/models/other", "/nowhere"):
        await client.get(path)
    connection = await connect()
    connection.send(b"no HTTP\r\n\r\n")
    assert (await connection.response())[0] == 400
    await client.get("/metrics")
    [counts] = backend.http_counts
    assert sorted(counts.answers) == [
        (("/v1/models/{model}", 200), 1),
        (("/v1/models/{model}", 404), 1),
        (("none", 400), 1),
        (("none", 404), 1),
    ]
    assert counts.connections >= 1
    await client.get("/metrics")
    assert backend.http_counts[1].answers == [(("/metrics", 200), 1)]
