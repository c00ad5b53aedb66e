"""Bodies of Responses and Messages as the chat completions that they ask for, and what of them is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dynrt.runtime.errors import InvalidRequestError
from dynrt.runtime.http.anthropic import input as messages_input
from dynrt.runtime.http.parameters.fields import Fields, Problems
from dynrt.runtime.http.responses import input as responses_input

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
USED = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "add", "description": "adds", "parameters": SCHEMA}}


def checked(read: Callable[[Fields], dict[str, Any]], values: dict[str, Any]) -> dict[str, Any]:
    """The chat body that `read` makes, without what it does not ask for."""
    fields = Fields(values, Problems())
    body = read(fields)
    fields.problems.raise_if_any()
    return {name: value for name, value in body.items() if value is not None}


def from_responses(**values: Any) -> dict[str, Any]:
    return checked(responses_input.chat_body, values)


def from_messages(**values: Any) -> dict[str, Any]:
    return checked(
        lambda fields: messages_input.chat_body(fields, wants_answer=True), {"max_tokens": 9, **values}
    )


def test_responses_of_text() -> None:
    body = from_responses(
        model="m", input="hi", instructions="Be brief.", max_output_tokens=5, top_p=0.5, stream=True
    )
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}],
        "max_completion_tokens": 5,
        "top_p": 0.5,
        "stream": True,
    }


def test_responses_of_a_conversation_with_calls() -> None:
    reasoning = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'}
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        reasoning,
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "So:"}]},
        call,
        {**call, "call_id": "c2"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        reasoning,
    ]
    assert from_responses(input=items)["messages"] == [
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "reasoning_content": "Hm.",
            "content": "So:",
            "tool_calls": [CALL, {**CALL, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "3"},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm."},
    ]


def test_tools_of_responses() -> None:
    tool = {"type": "function", "name": "add", "description": "adds", "parameters": SCHEMA}
    body = from_responses(input="x", tools=[tool], tool_choice={"type": "function", "name": "add"})
    assert body["tools"] == [TOOL]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert from_responses(input="x", tools=[tool], tool_choice="required")["tool_choice"] == "required"
    assert "tools" not in from_responses(input="x", tools=[], tool_choice="auto")


def test_text_formats_and_effort_of_responses() -> None:
    form = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    body = from_responses(input="x", text={"format": form}, reasoning={"effort": "low"})
    assert body["response_format"] == {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    assert body["reasoning_effort"] == "low"
    assert "response_format" not in from_responses(input="x", text={"format": {"type": "text"}})


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": [{"type": "item_reference", "id": "1"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
        ({"input": "x", "instructions": 1}, "instructions"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "store": True}, "store"),
        ({"input": "x", "conversation": "c"}, "conversation"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"input": "x", "tools": "add"}, "tools"),
    ],
)  # fmt: skip
def test_refusals_of_responses(values: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        from_responses(**values)
    assert refused.value.param == param


def test_messages_of_text() -> None:
    body = from_messages(
        model="m",
        system=[{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}],
        messages=[HI],
        temperature=0.5,
        top_k=4,
        stop_sequences=["x"],
        stream=True,
        metadata={"user_id": "u"},
    )
    assert body == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be\nbrief."}, {"role": "user", "content": "hi"}],
        "stop": ["x"],
        "temperature": 0.5,
        "top_k": 4,
        "max_tokens": 9,
        "stream": True,
    }


def test_messages_of_a_conversation_with_calls() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    answer = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "So:"},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "2"}]},
        {"type": "tool_result", "tool_use_id": "c2"},
        {"type": "text", "text": "Go on."},
    ]
    messages = [asked, {"role": "assistant", "content": answer}, {"role": "user", "content": results}]
    assert from_messages(messages=messages)["messages"] == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "reasoning_content": "Hm.", "content": "So:", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "user", "content": "Go on."},
    ]


def test_a_final_turn_of_the_assistant_goes_on() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer is"}]
    body = from_messages(messages=messages)
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False


def test_tools_of_messages() -> None:
    messages = [HI]
    tools = [{"name": "add", "description": "adds", "input_schema": SCHEMA}]
    choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    body = from_messages(messages=messages, tools=tools, tool_choice=choice)
    assert body["tools"] == [TOOL] and body["parallel_tool_calls"] is False
    assert body["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    for word, chat_word in (("any", "required"), ("auto", "auto"), ("none", "none")):
        assert (
            from_messages(messages=messages, tools=tools, tool_choice={"type": word})["tool_choice"]
            == chat_word
        )


@pytest.mark.parametrize(("kind", "enabled"), [("enabled", True), ("adaptive", True), ("disabled", False)])
def test_thinking_is_told_to_the_template(kind: str, enabled: bool) -> None:
    body = from_messages(messages=[HI], thinking={"type": kind, "budget_tokens": 1024})
    assert body["chat_template_kwargs"] == {"enable_thinking": enabled}


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"messages": [HI], "max_tokens": None}, "max_tokens"),
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["x"]}, "messages[0]"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        ({"messages": [HI, {"role": "assistant", "content": [USED]}]}, "messages"),
        ({"messages": [HI], "system": 3}, "system"),
        ({"messages": [HI], "thinking": {"type": "often"}}, "thinking.type"),
        ({"messages": [HI], "tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"messages": [HI], "tools": [{"name": "f"}], "tool_choice": {"type": "all"}}, "tool_choice.type"),
        ({"messages": [HI], "mcp_servers": [{}]}, "mcp_servers"),
    ],
)
def test_refusals_of_messages(values: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        from_messages(**values)
    assert refused.value.param == param
