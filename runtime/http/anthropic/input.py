"""Reads a body of Anthropic's Messages API as the body of a chat completion; pure."""

from __future__ import annotations

from typing import Any

import msgspec

from dynrt.runtime.http.parameters.fields import Fields, Problems
from dynrt.runtime.http.parameters.sampling import STOP, TEMPERATURE, TOP_K, TOP_P
from dynrt.runtime.http.parameters.shared import MODEL, STREAM

Body = dict[str, Any]

SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "cache_salt",
    "chat_template_kwargs",
    "dynrt",
)
OWN_NAMES = {"stop": "stop_sequences"}  # of the chat's fields, what they are called here


def chat_body(fields: Fields, *, wants_answer: bool) -> Body:
    """The same request as a chat completion; problems are left with `fields`.

    `wants_answer`: max_tokens is needed.
    """
    if wants_answer and fields.values.get("max_tokens") is None:
        fields.refuse("max_tokens", "it must be given: the most tokens that the answer may have")
    for name in ("mcp_servers", "container"):
        if fields.values.get(name):
            fields.refuse(name, "it must be left out: this server runs no tools itself")
    system = _texts(fields, "system")
    messages = [{"role": "system", "content": "\n".join(system)}] if system else []
    messages += _messages(fields)
    body = {name: fields.values[name] for name in SAME if name in fields.values}
    body |= {"messages": messages, "stop": fields.values.get("stop_sequences")}
    if messages and messages[-1].get("tool_calls"):
        fields.refuse("messages", "it must end with the results of the calls that its last message makes")
    elif messages and messages[-1]["role"] == "assistant":  # the answer goes on with what it says
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    return body | _thinking(fields) | _tools(fields)


def _thinking(fields: Fields) -> Body:
    """Whether the model is to reason; how long it may is not limited apart from max_tokens."""
    match fields.child("thinking").values.get("type"):
        case None:
            return {}
        case "enabled" | "adaptive":
            enabled = True
        case "disabled":
            enabled = False
        case _:
            fields.child("thinking").refuse("type", 'it must be "enabled", "adaptive" or "disabled"')
            return {}
    return {
        "chat_template_kwargs": {"enable_thinking": enabled, **fields.child("chat_template_kwargs").values}
    }


def _tools(fields: Fields) -> Body:
    tools = fields.values.get("tools")
    if not tools:
        return {}
    if not isinstance(tools, list):
        fields.refuse("tools", "it must be a list of tools")
        return {}
    choice = fields.child("tool_choice")
    body: Body = {"tools": [_tool(fields, index, tool) for index, tool in enumerate(tools)]}
    body["parallel_tool_calls"] = not choice.boolean("disable_parallel_tool_use", False)
    match choice.values.get("type"):
        case None:
            pass
        case "auto" | "none" as word:
            body["tool_choice"] = word
        case "any":
            body["tool_choice"] = "required"
        case "tool":
            body["tool_choice"] = {"type": "function", "function": {"name": choice.values.get("name")}}
        case _:
            choice.refuse("type", 'it must be "auto", "any", "tool" or "none"')
    return body


def _tool(fields: Fields, index: int, value: object) -> Body:
    path = f"tools[{index}]"
    if not isinstance(value, dict) or value.get("type") not in (None, "custom"):
        fields.problems.add(
            path, f'{path} must be {{"name": …, "input_schema": …}}; tools that the server runs are not built'
        )
        return {}
    tool = Fields(value, fields.problems, path)
    schema = tool.child("input_schema").values
    function = {"name": value.get("name"), "description": value.get("description"), "parameters": schema}
    return {"type": "function", "function": {key: one for key, one in function.items() if one is not None}}


def _messages(fields: Fields) -> list[Body]:
    messages = fields.values.get("messages")
    if not isinstance(messages, list) or not messages:
        fields.refuse("messages", "it must be a list of at least one message")
        return []
    return [one for index, value in enumerate(messages) for one in _message(fields.problems, index, value)]


def _message(problems: Problems, index: int, value: object) -> list[Body]:
    """One message here can be several of a chat: each tool's result is one of its own there."""
    path = f"messages[{index}]"
    if not isinstance(value, dict):
        problems.add(path, f'{path} must be an object such as {{"role": "user", "content": "..."}}')
        return []
    message = Fields(value, problems, path)
    match value.get("role"):
        case "user":
            return _user_turn(message)
        case "assistant":
            return [_assistant_turn(message)]
    message.refuse("role", "it must be user or assistant; instructions belong into system")
    return []


def _user_turn(message: Fields) -> list[Body]:
    results: list[Body] = []
    texts: list[str] = []
    for block in _blocks(message, "content", "text", "tool_result"):
        if block.values["type"] == "text":
            texts.append(block.text("text"))
        else:
            content = "\n".join(_texts(block, "content"))
            results.append({"role": "tool", "tool_call_id": block.text("tool_use_id"), "content": content})
    return [*results, {"role": "user", "content": "\n".join(texts)}] if texts or not results else results


def _assistant_turn(message: Fields) -> Body:
    turn: Body = {"role": "assistant", "content": None}
    texts: list[str] = []
    calls: list[Body] = []
    for block in _blocks(message, "content", "text", "tool_use", "thinking", "redacted_thinking"):
        match block.values["type"]:
            case "text":
                texts.append(block.text("text"))
            case "thinking":
                turn["reasoning_content"] = block.text("thinking")
            case "tool_use":
                calls.append(_call(block))
    if texts:
        turn["content"] = "".join(texts)
    return {**turn, "tool_calls": calls} if calls else turn


def _call(block: Fields) -> Body:
    arguments = msgspec.json.encode(block.child("input").values).decode()
    function = {"name": block.text("name"), "arguments": arguments}
    return {"id": block.text("id"), "type": "function", "function": function}


def _blocks(fields: Fields, name: str, *kinds: str) -> list[Fields]:
    """The blocks of a field; others than of `kinds` are refused, and a string is one block of text."""
    value = fields.values.get(name)
    if isinstance(value, str):
        value = [{"type": "text", "text": value}]
    if not isinstance(value, list):
        fields.refuse(name, "it must be a string or a list of blocks")
        return []
    blocks = []
    for index, block in enumerate(value):
        path = f"{fields.param(name)}[{index}]"
        if isinstance(block, dict) and block.get("type") in kinds:
            blocks.append(Fields(block, fields.problems, path))
        else:
            fields.problems.add(
                path, f"{path} must be a block of type {', '.join(kinds)}; others are not built"
            )
    return blocks


def _texts(fields: Fields, name: str) -> list[str]:
    """The texts of a field that is a string or a list of text blocks; none if it is absent."""
    if fields.values.get(name) is None:
        return []
    return [block.text("text") for block in _blocks(fields, name, "text")]


_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}
_MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": _TEXTS},
    "required": ["role", "content"],
}
COUNT_SCHEMA: Body = {
    "title": "TokenCountRequest",
    "type": "object",
    "properties": {
        "model": MODEL.schema,
        "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
        "system": {"anyOf": [*_TEXTS["anyOf"], {"type": "null"}]},
        "thinking": {"type": ["object", "null"]},
        "tools": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_choice": {"type": ["object", "null"]},
    },
    "required": ["messages"],
    "additionalProperties": True,
}
MESSAGE_SCHEMA: Body = {
    **COUNT_SCHEMA,
    "title": "MessageRequest",
    "properties": {
        **COUNT_SCHEMA["properties"],
        **{one.name: one.schema for one in (STREAM, TEMPERATURE, TOP_P, TOP_K)},
        "max_tokens": {"type": "integer", "minimum": 1},
        "stop_sequences": STOP.schema,
    },
    "required": ["messages", "max_tokens"],
}
