"""Tools and reasoning in chats: whole and streamed, what reaches the backend, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest
from scripted_backend import chat, events_of, scored
from tool_backend import ANSWER, ARGUMENTS, CALL, SCHEMA, TOOL, ToolBackend

from dynrt.runtime.requests import GenerateOutput

PATH = "/v1/chat/completions"


@pytest.fixture
async def backend() -> ToolBackend:
    return ToolBackend()


async def answered(client: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    """The one choice of a whole answer."""
    async with client.post(PATH, json=chat(**fields)) as response:
        assert response.status == 200, await response.text()
        [choice] = (await response.json())["choices"]
        return choice


async def streamed(client: aiohttp.ClientSession, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a stream's chunks."""
    async with client.post(PATH, json=chat(stream=True, **fields)) as response:
        assert response.status == 200, await response.text()
        *chunks, done = events_of(await response.read())
    assert done == "[DONE]"
    return [choice for chunk in chunks for choice in chunk["choices"]]


async def refused(client: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    async with client.post(PATH, json=chat(**fields)) as response:
        assert response.status == 400, await response.text()
        return (await response.json())["error"]


def joined(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that deltas add up to, as clients add them up."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in (choice["delta"] for choice in choices):
        for name in ("content", "reasoning_content"):
            message[name] += delta.get(name, "")
        for part in delta.get("tool_calls", []):
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append(
                    {"id": part["id"], "type": part["type"], "function": part["function"]}
                )
            else:
                message["tool_calls"][part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return message


async def test_a_call_whole(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    choice = await answered(client, tools=[TOOL])
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("Let me see.", "Hm.")
    [call] = message["tool_calls"]
    assert call["type"] == "function" and call["id"].startswith("call_")
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert backend.tools == [[TOOL]]
    shown = backend.requests[0].sampling.shown_special_tokens
    assert {"<tool_call>", "</tool_call>", "<think>", "</think>"} <= set(shown)


async def test_a_call_streamed(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    *choices, last = await streamed(client, tools=[TOOL])
    assert choices[0]["delta"]["role"] == "assistant"
    assert not any("role" in choice["delta"] for choice in choices[1:])
    message = joined(choices)
    assert (message["content"], message["reasoning_content"]) == ("Let me see.", "Hm.")
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "get_weather", "arguments": ARGUMENTS}
    ]
    assert (last["delta"], last["finish_reason"]) == ({}, "tool_calls")
    assert all(choice["finish_reason"] is None for choice in choices)
    pieces = [choice for choice in choices if "tool_calls" in choice["delta"]]
    assert len(pieces) > 5, "arguments come as they are made"
    assert backend.requests[0].frame is None, "an engine cannot tell calls from text"


async def test_calls_alone_have_no_content(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    backend.says(CALL + "\n" + CALL)
    message = (await answered(client, tools=[TOOL]))["message"]
    assert message["content"] is None and "reasoning_content" not in message
    first, second = message["tool_calls"]
    assert first["function"] == second["function"] and first["id"] != second["id"]


async def test_one_call_where_no_more_are_wanted(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    backend.says(CALL + CALL)
    message = (await answered(client, tools=[TOOL], parallel_tool_calls=False))["message"]
    assert len(message["tool_calls"]) == 1


async def test_text_without_a_call(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    backend.says("No <tool_call> needed.")
    choice = await answered(client, tools=[TOOL])
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "No <tool_call> needed.")
    assert "tool_calls" not in choice["message"]
    choices = await streamed(client, tools=[TOOL])
    assert joined(choices)["content"] == "No <tool_call> needed." and choices[-1]["finish_reason"] == "stop"


async def test_an_answer_that_is_cut_off_in_a_call(
    client: aiohttp.ClientSession, backend: ToolBackend
) -> None:
    backend.says(CALL[:60], "length")
    choice = await answered(client, tools=[TOOL])
    assert choice["finish_reason"] == "length"
    [call] = choice["message"]["tool_calls"]
    assert ARGUMENTS.startswith(call["function"]["arguments"])


async def test_no_tools_wanted(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    choice = await answered(client, tools=[TOOL], tool_choice="none")
    assert choice["message"]["content"] == ANSWER.split("</think>\n\n")[1]
    assert backend.tools == [None]


async def test_several_choices_each_have_their_calls(
    client: aiohttp.ClientSession, backend: ToolBackend
) -> None:
    choices = await streamed(client, tools=[TOOL], n=2)
    for index in range(2):
        *own, last = [choice for choice in choices if choice["index"] == index]
        assert last["finish_reason"] == "tool_calls" and joined(own)["content"] == "Let me see."
        assert len(joined(own)["tool_calls"]) == 1


async def test_log_probabilities_of_all_tokens_are_told(
    client: aiohttp.ClientSession, backend: ToolBackend
) -> None:
    backend.script = [
        scored([ord("<")], "<thi"), scored([ord("t")], "nk>"), scored([ord("H")], "Hm."),
        scored([ord("/")], "</think>"), scored([ord("Y")], "Yes", "stop"),
    ]  # fmt: skip
    choices = await streamed(client, logprobs=True)
    told = [one["token"] for choice in choices for one in (choice.get("logprobs") or {}).get("content", [])]
    assert told == ["<", "t", "H", "/", "Y"]
    assert joined(choices[:-1]) == {"content": "Yes", "reasoning_content": "Hm.", "tool_calls": []}


async def test_ids_of_all_tokens_are_told(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    async with client.post(PATH, json=chat(tools=[TOOL], stream=True, return_token_ids=True)) as response:
        *chunks, _done = events_of(await response.read())
    assert chunks[0]["prompt_token_ids"] == [ord("h"), ord("i")]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    token_ids = [i for chunk in chunks for choice in chunk["choices"] for i in choice.get("token_ids", [])]
    outputs = [step for step in backend.script if isinstance(step, GenerateOutput)]
    assert token_ids == [i for output in outputs for i in output.token_ids]


async def test_reasoning_that_the_prompt_opens(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    backend.prompt_end = "<|assistant|><think>\n"
    backend.says("Hm.</think>Yes")
    message = (await answered(client))["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes")


async def test_tokens_of_reasoning_are_counted(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    """The same whole and streamed, in all choices together; none where a model does not reason."""
    in_thought = {"reasoning_tokens": 2 * len("\nHm.\n")}
    async with client.post(PATH, json=chat(n=2)) as response:
        assert (await response.json())["usage"]["completion_tokens_details"] == in_thought
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with client.post(PATH, json=chat(n=2, stream=True, stream_options=options)) as response:
        *chunks, last, _done = events_of(await response.read())
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert counts[0] == 0 and counts[-1] == in_thought["reasoning_tokens"]
    assert last["usage"]["completion_tokens_details"] == in_thought
    backend.chat_template = "{{ messages }}"
    async with client.post(PATH, json=chat()) as response:
        assert "completion_tokens_details" not in (await response.json())["usage"]


async def test_a_required_call_follows_a_grammar(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    backend.takes_grammar()
    backend.says(f'[{{"name": "get_weather", "arguments": {ARGUMENTS}}}]')
    choice = await answered(client, tools=[TOOL], tool_choice="required")
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    grammar = backend.requests[0].sampling.grammar
    assert grammar is not None and json.loads(grammar.spec)["type"] == "array"


async def test_a_named_call_follows_its_schema(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    backend.takes_grammar()
    backend.says(ARGUMENTS)
    named = {"type": "function", "function": {"name": "get_weather"}}
    *choices, last = await streamed(client, tools=[TOOL], tool_choice=named)
    [call] = joined(choices)["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert last["finish_reason"] == "tool_calls"
    grammar = backend.requests[0].sampling.grammar
    assert grammar is not None and json.loads(grammar.spec) == SCHEMA


async def test_what_tools_cannot_be_had_with(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    error = await refused(client, tools=[TOOL], tool_choice="required")
    assert error["param"] == "tool_choice" and "engine" in error["message"]
    backend.takes_grammar()
    json_wanted = {"type": "json_object"}
    error = await refused(client, tools=[TOOL], tool_choice="required", response_format=json_wanted)
    assert error["param"] == "tool_choice" and "response_format" in error["message"]
    backend.chat_template = "{{ messages }}"
    error = await refused(client, tools=[TOOL])
    assert error["param"] == "tools" and "--tool-parser" in error["message"]
    assert not backend.requests


async def test_a_template_of_its_own_for_tools_tells_the_format(
    client: aiohttp.ClientSession, backend: ToolBackend
) -> None:
    backend.tool_template, backend.chat_template = backend.chat_template, "{{ messages }}"
    backend.says(CALL)
    assert (await answered(client, tools=[TOOL]))["finish_reason"] == "tool_calls"


async def test_a_plain_chat_keeps_its_frames(client: aiohttp.ClientSession, backend: ToolBackend) -> None:
    backend.chat_template = "{{ messages }}"
    backend.script = [GenerateOutput([1], "Hi", "stop")]
    await streamed(client)
    assert backend.requests[0].frame is not None
