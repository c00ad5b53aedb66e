"""POST /v1/messages and count_tokens: answered through the chat's path; errors in Anthropic's shape."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from scripted_backend import CONTEXT, MODEL
from tool_backend import SCHEMA, TOOL, ToolBackend

from dynrt.runtime.errors import EngineError, OverloadedError
from dynrt.runtime.requests import GenerateOutput

PATH = "/v1/messages"
HI = {"role": "user", "content": "hi"}
OWN_TOOL = {"name": "get_weather", "description": "now", "input_schema": SCHEMA}
CONTENT = ["thinking", "text", "tool_use"]


@pytest.fixture
async def backend() -> ToolBackend:
    return ToolBackend()


async def post(
    client: aiohttp.ClientSession, status: int = 200, path: str = PATH, **body: Any
) -> dict[str, Any]:
    async with client.post(
        path, json={"model": MODEL, "max_tokens": 9, "messages": [HI], **body}
    ) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def stream(client: aiohttp.ClientSession, **body: Any) -> list[dict[str, Any]]:
    """The data of all events, whose names are their types."""
    asked = {"model": MODEL, "max_tokens": 9, "messages": [HI], "stream": True, **body}
    async with client.post(PATH, json=asked) as response:
        assert response.status == 200, await response.text()
        blocks = (await response.text()).removesuffix("\n\n").split("\n\n")
    events = []
    for name, data in (block.split("\n") for block in blocks):
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_message(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    message = await post(
        client, system="Be brief.", tools=[OWN_TOOL], stop_sequences=["END"], temperature=0.5
    )
    assert message["type"] == "message" and message["id"].startswith("msg_")
    assert [block["type"] for block in message["content"]] == CONTENT
    assert message["content"][2]["input"] == {"city": "Zürich 🦜"}
    assert message["stop_reason"] == "tool_use"
    assert message["usage"]["input_tokens"] == len("Be brief.hi")
    assert message["usage"]["output_tokens"] > 10
    [(messages, _, _)] = backend.chats
    assert messages == [{"role": "system", "content": "Be brief."}, HI]
    assert backend.tools == [[TOOL]]
    sampling = backend.requests[0].sampling
    assert (sampling.max_tokens, sampling.stop, sampling.temperature) == (9, ("END",), 0.5)


async def test_a_streamed_message(client: aiohttp.ClientSession) -> None:
    start, ping, *events, end, stop = await stream(client, tools=[OWN_TOOL])
    assert [event["type"] for event in (start, ping, end, stop)] == [
        "message_start", "ping", "message_delta", "message_stop",
    ]  # fmt: skip
    assert start["message"]["usage"]["input_tokens"] == 2
    opened = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert opened == CONTENT
    assert end["delta"]["stop_reason"] == "tool_use" and end["usage"]["output_tokens"] > 10


async def test_a_stop_sequence_is_told(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    backend.says("So", "stop", "END")
    message = await post(client, stop_sequences=["END"])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END")


async def test_a_message_that_goes_on(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    await post(client, messages=[HI, {"role": "assistant", "content": "The answer is"}])
    [(_, ends, _)] = backend.chats
    assert ends == {"add_generation_prompt": False, "continue_final_message": True}


async def test_tokens_are_counted(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    body = {"model": MODEL, "messages": [HI], "system": "Be brief.", "tools": [OWN_TOOL]}
    async with client.post(PATH + "/count_tokens", json=body) as response:
        assert (response.status, await response.json()) == (200, {"input_tokens": 11})
    assert backend.tools == [[TOOL]] and not backend.requests
    error = await post(client, 400, PATH + "/count_tokens", messages=[])
    assert error["type"] == "error" and "messages" in error["error"]["message"]


@pytest.mark.parametrize(
    ("body", "status", "kind", "clause"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": CONTEXT}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences"),
        ({"temperature": "hot"}, 400, "invalid_request_error", "temperature"),
        ({"tools": [OWN_TOOL], "tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"model": "claude"}, 404, "not_found_error", MODEL),
    ],
)
async def test_refusals(
    client: aiohttp.ClientSession, body: dict[str, Any], status: int, kind: str, clause: str
) -> None:
    error = await post(client, status, **body)
    assert error["type"] == "error" and error["error"]["type"] == kind
    assert clause in error["error"]["message"] and error["request_id"]


async def test_an_overload_before_the_first_token(
    client: aiohttp.ClientSession, backend: ToolBackend
) -> None:
    backend.script = [OverloadedError("full", retry_after_s=3)]
    error = await post(client, 503, stream=True)
    assert error["error"] == {"type": "overloaded_error", "message": "full"}


async def test_an_error_in_the_stream(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    backend.script = [GenerateOutput([1], "No"), EngineError("out of luck")]
    last = (await stream(client))[-1]
    assert last["type"] == "error"
    assert last["error"] == {"type": "api_error", "message": "out of luck"}
