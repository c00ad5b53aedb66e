"""Reads a body of OpenAI's Responses API as the body of a chat completion; pure."""

from __future__ import annotations

from typing import Any

from dynrt.runtime.http.answers.tools.request import PARALLEL_CALLS
from dynrt.runtime.http.openai.chat_options import REASONING_EFFORT
from dynrt.runtime.http.parameters.fields import Fields, Problems
from dynrt.runtime.http.parameters.sampling import TEMPERATURE, TOP_P
from dynrt.runtime.http.parameters.shared import MAX_COMPLETION_TOKENS, MODEL, STREAM
from dynrt.runtime.http.responses.types import Echo

Body = dict[str, Any]

# fields that a chat has as well
SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "cache_salt",
    "chat_template_kwargs",
    "dynrt",
)
# of the chat's fields, what they are called here
OWN_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}
# what needs a server that keeps responses, and the way out
STATEFUL = {
    "previous_response_id": "send the earlier turns in input",
    "conversation": "send the earlier turns in input",
    "prompt": "send the prompt itself in instructions and input",
    "background": "wait for the answer, or stream it",
    "store": "leave it out or send false",
}
LOGPROBS = "message.output_text.logprobs"
TURN_ORDER = ("reasoning_content", "content", "tool_calls")
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")
TEXT_PARTS = ("input_text", "output_text", "text")


def chat_body(fields: Fields) -> Body:
    """The same request as a chat completion; problems are left with `fields`."""
    for name, way_out in STATEFUL.items():
        if fields.values.get(name):
            fields.refuse(name, f"it must be left out, as this server keeps no responses: {way_out}")
    _refuse_logprobs(fields)
    fields.child("metadata")
    body = {name: fields.values[name] for name in SAME if name in fields.values}
    body["max_completion_tokens"] = fields.values.get("max_output_tokens")
    body["messages"] = _instructions(fields) + _messages(fields)
    if effort := fields.child("reasoning").values.get("effort"):
        body["reasoning_effort"] = effort
    return body | _response_format(fields) | _tools(fields)


def _refuse_logprobs(fields: Fields) -> None:
    include = fields.values.get("include")
    if isinstance(include, list) and LOGPROBS in include:
        fields.refuse("include", f"it must be without {LOGPROBS}: only /v1/chat/completions tells them")
    if fields.values.get("top_logprobs"):
        fields.refuse(
            "top_logprobs", "it must be left out: only /v1/chat/completions tells log probabilities"
        )


def echo_of(values: Body) -> Echo:
    """What the response repeats of a request that was found to be in order."""
    names = Echo.__struct_fields__
    return Echo(**{name: values[name] for name in names if values.get(name) is not None})


def _instructions(fields: Fields) -> list[Body]:
    text = fields.values.get("instructions")
    if text is not None and not isinstance(text, str):
        fields.refuse("instructions", "it must be a string")
    return [{"role": "system", "content": text}] if text else []


def _response_format(fields: Fields) -> Body:
    """`text.format`, which is flat where the chat's response_format is nested."""
    form = fields.child("text").child("format")
    match form.values.get("type"):
        case None | "text":
            return {}
        case "json_schema":
            schema = {name: value for name, value in form.values.items() if name != "type"}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
    return {"response_format": form.values}


def _tools(fields: Fields) -> Body:
    tools = fields.values.get("tools")
    body: Body = {}
    if isinstance(tools, list) and tools:
        body["tools"] = [_tool(fields.problems, index, tool) for index, tool in enumerate(tools)]
    elif tools is not None and tools != []:
        fields.refuse("tools", "it must be a list of tools")
    match fields.values.get("tool_choice"):
        case {"type": "function", "name": name}:
            body["tool_choice"] = {"type": "function", "function": {"name": name}}
        case choice if choice is not None and body:
            body["tool_choice"] = choice
    return body


def _tool(problems: Problems, index: int, value: object) -> Body:
    path = f"tools[{index}]"
    if not isinstance(value, dict) or value.get("type") != "function":
        problems.add(path, f"{path} must be of type function; tools that the server runs are not built")
        return {}
    function = {name: one for name, one in value.items() if name != "type" and one is not None}
    return {"type": "function", "function": function}


def _messages(fields: Fields) -> list[Body]:
    value = fields.values.get("input")
    if isinstance(value, str) and value:
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        fields.refuse("input", "it must be a string or a list of items, not empty")
        return []
    items = [_item(fields.problems, index, item) for index, item in enumerate(value)]
    return _joined_turns([item for item in items if item is not None])


def _item(problems: Problems, index: int, value: object) -> Body | None:
    """One item as a message; None if it is refused."""
    path = f"input[{index}]"
    if not isinstance(value, dict):
        problems.add(path, f'{path} must be an object such as {{"role": "user", "content": "..."}}')
        return None
    item = Fields(value, problems, path)
    match value.get("type", "message"):
        case "message":
            return _message(item)
        case "function_call":
            function = {"name": item.text("name"), "arguments": item.text("arguments")}
            call = {"id": item.text("call_id"), "type": "function", "function": function}
            return {"role": "assistant", "tool_calls": [call]}
        case "function_call_output":
            return {
                "role": "tool",
                "tool_call_id": item.text("call_id"),
                "content": _text(item, "output"),
            }
        case "reasoning":
            return {"role": "assistant", "reasoning_content": _reasoning(item)}
    item.refuse("type", f"it must be one of {', '.join(ITEM_TYPES)}; others are not built")
    return None


def _message(item: Fields) -> Body | None:
    role = item.values.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        item.refuse("role", "it must be user, assistant, system or developer")
        return None
    return {"role": role, "content": _text(item, "content")}


def _reasoning(item: Fields) -> str:
    parts = item.values.get("content") or item.values.get("summary") or []
    if isinstance(parts, list) and all(isinstance(part, dict) for part in parts):
        return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))
    item.refuse("content", "it must be a list of reasoning texts")
    return ""


def _joined_turns(messages: list[Body]) -> list[Body]:
    """What one assistant's turn consists of is one message in a chat."""
    turns: list[Body] = []
    for message in messages:
        last = turns[-1] if turns else {}
        if message["role"] == last.get("role") == "assistant" and _continues(message, last):
            calls = last.get("tool_calls", []) + message.get("tool_calls", [])
            turns[-1] = {**last, **message, **({"tool_calls": calls} if calls else {})}
        else:
            turns.append(message)
    return [{"content": None, **turn} if turn["role"] == "assistant" else turn for turn in turns]


def _continues(message: Body, last: Body) -> bool:
    return "tool_calls" in message or _rank(message) > _rank(last)


def _rank(message: Body) -> int:
    return max(rank for rank, part in enumerate(TURN_ORDER) if part in message)


def _text(fields: Fields, name: str) -> str:
    """A string, or the texts of a list of parts."""
    value = fields.values.get(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        fields.refuse(name, "it must be a string or a list of text parts")
        return ""
    return "\n".join(
        _part(fields, f"{fields.param(name)}[{index}]", part) for index, part in enumerate(value)
    )


def _part(fields: Fields, path: str, part: object) -> str:
    if isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
        return str(part["text"])
    fields.problems.add(path, f'{path} must be {{"type": "input_text", "text": "..."}}; others are not built')
    return ""


_STRING_OR_NULL = {"type": ["string", "null"]}
_ITEM = {"type": "object", "properties": {"type": {"enum": [*ITEM_TYPES]}, "role": _STRING_OR_NULL}}
RESPONSE_SCHEMA: Body = {
    "title": "ResponseRequest",
    "type": "object",
    "properties": {
        **{one.name: one.schema for one in (MODEL, STREAM, TEMPERATURE, TOP_P, PARALLEL_CALLS)},
        "input": {
            "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "minItems": 1, "items": _ITEM}],
            "description": "A question, or the items of a conversation.",
        },
        "instructions": _STRING_OR_NULL,
        "max_output_tokens": MAX_COMPLETION_TOKENS.schema,
        "reasoning": {"type": ["object", "null"], "properties": {"effort": REASONING_EFFORT.schema}},
        "text": {"type": ["object", "null"], "properties": {"format": {"type": ["object", "null"]}}},
        "tools": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_choice": {},
        **{name: {"enum": [False, None, ""]} for name in STATEFUL},
    },
    "required": ["input"],
    "additionalProperties": True,
}
