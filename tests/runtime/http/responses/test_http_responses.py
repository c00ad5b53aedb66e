"""POST /v1/responses: answered through the chat's path, whole and streamed; refusals in its own words."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from scripted_backend import CONTEXT, MODEL
from tool_backend import ARGUMENTS, SCHEMA, ToolBackend

from dynrt.runtime.errors import EngineError
from dynrt.runtime.requests import GenerateOutput

PATH = "/v1/responses"
TOOL = {"type": "function", "name": "get_weather", "description": "now", "parameters": SCHEMA, "strict": True}


@pytest.fixture
async def backend() -> ToolBackend:
    return ToolBackend()


async def post(client: aiohttp.ClientSession, status: int = 200, **body: Any) -> dict[str, Any]:
    async with client.post(PATH, json={"model": MODEL, "input": "hi", **body}) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def stream(client: aiohttp.ClientSession, **body: Any) -> list[dict[str, Any]]:
    """The data of all events, whose names are their types."""
    async with client.post(PATH, json={"model": MODEL, "input": "hi", "stream": True, **body}) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).removesuffix("\n\n").split("\n\n")
    events = []
    for name, data in (block.split("\n") for block in lines):
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


async def test_a_response(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    response = await post(
        client,
        instructions="Be brief.",
        max_output_tokens=9,
        temperature=0.5,
        tools=[TOOL],
        metadata={"k": "v"},
    )
    assert response["id"].startswith("resp_") and response["status"] == "completed"
    reasoning, message, call = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert [part["text"] for part in message["content"]] == ["Let me see."]
    assert (call["name"], call["arguments"]) == ("get_weather", ARGUMENTS)
    assert (response["instructions"], response["max_output_tokens"]) == ("Be brief.", 9)
    assert (response["temperature"], response["tools"], response["metadata"]) == (0.5, [TOOL], {"k": "v"})
    usage = response["usage"]
    assert usage["input_tokens"] == len("Be brief.hi") and usage["output_tokens"] > 10
    assert usage["output_tokens_details"] == {"reasoning_tokens": len("\nHm.\n")}
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    [(messages, _, _)] = backend.chats
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    [request] = backend.requests
    assert (request.sampling.max_tokens, request.sampling.temperature) == (9, 0.5)
    assert backend.tools[0] is not None and backend.tools[0][0]["function"]["name"] == "get_weather"


async def test_a_streamed_response_tells_the_same(client: aiohttp.ClientSession) -> None:
    *events, last = await stream(client, tools=[TOOL])
    assert last["type"] == "response.completed" and last["response"]["usage"]["output_tokens"] > 10
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["response"]["output"] and len(done) == 3
    whole = await post(client, tools=[TOOL])
    assert [item["type"] for item in whole["output"]] == [item["type"] for item in done]
    assert last["response"]["usage"] == whole["usage"]


async def test_an_error_in_the_stream(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    backend.script = [GenerateOutput([1], "No"), EngineError("out of luck")]
    last = (await stream(client))[-1]
    assert (last["type"], last["message"]) == ("error", "out of luck")
    assert last["error"]["message"] == "out of luck", "OpenAI's clients look for this"


async def test_a_call_and_its_result_are_sent_back(
    client: aiohttp.ClientSession, backend: ToolBackend
) -> None:
    first = await post(client, tools=[TOOL])
    call = first["output"][2]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "18 °C"}
    await post(client, tools=[TOOL], input=[{"role": "user", "content": "hi"}, *first["output"], result])
    messages = backend.chats[1][0]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
    assert messages[1]["tool_calls"][0]["id"] == messages[2]["tool_call_id"] == call["call_id"]
    assert (messages[1]["content"], messages[1]["reasoning_content"]) == ("Let me see.", "Hm.")


async def test_effort_goes_to_the_template(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    await post(client, reasoning={"effort": "low", "summary": "auto"})
    assert backend.chats[0][2] == {"reasoning_effort": "low"}


async def test_the_form_of_text(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    backend.takes_grammar()
    form = {"type": "json_schema", "name": "weather", "schema": SCHEMA, "strict": True}
    response = await post(client, text={"format": form})
    assert response["text"] == {"format": form}
    grammar = backend.requests[0].sampling.grammar
    assert grammar is not None and json.loads(grammar.spec) == SCHEMA


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": None}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": CONTEXT}, "max_output_tokens"),
        ({"input": "x" * CONTEXT}, "input"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": "x"}, "metadata"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"include": ["message.output_text.logprobs"]}, "include"),
    ],
)
async def test_refusals(
    client: aiohttp.ClientSession, backend: ToolBackend, body: dict[str, Any], param: str
) -> None:
    error = (await post(client, 400, **body))["error"]
    assert error["param"] == param
    assert not backend.requests


async def test_an_unknown_model(client: aiohttp.ClientSession) -> None:
    error = (await post(client, 404, model="x"))["error"]
    assert error["code"] == "model_not_found" and MODEL in error["message"]
