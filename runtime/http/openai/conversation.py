"""Reads the messages of a chat request; the prompt encoder gives them the form that the model's template wants."""

from __future__ import annotations

from typing import Any

from dynrt.runtime.chat_messages import is_plain
from dynrt.runtime.http.parameters.fields import Fields, Problems
from dynrt.runtime.http.parameters.request_schema import Parameter

MAX_MESSAGES = 10_000  # each takes the event loop some microseconds
MAX_CALLS = 128  # of tools, in one message
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The messages, checked."""
    messages = fields.values.get("messages")
    if not isinstance(messages, list) or not 1 <= len(messages) <= MAX_MESSAGES:
        fields.refuse("messages", f"it must be a list of at least one message and at most {MAX_MESSAGES}")
        return []
    return [
        message if is_plain(message) else _read_message(message, fields.problems, f"messages[{index}]")
        for index, message in enumerate(messages)
    ]


def _read_message(value: object, problems: Problems, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        problems.add(path, f'{path} must be an object such as {{"role": "user", "content": "..."}}')
        return {}
    message = Fields(value, problems, path)
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        message.refuse("role", f"it must be one of {', '.join(ROLES)}")
        return {}
    _check_content(message, may_be_null=role == "assistant")
    if role == "assistant":
        _check_assistant(message)
    for name in ("tool_call_id", "name"):
        _check_text(message, name)
    return value


def _check_assistant(message: Fields) -> None:
    for name in REASONING_FIELDS:
        _check_text(message, name)
    if message.values.get("audio"):
        message.refuse("audio", "it must be left out: audio is not supported")
    if message.values.get("function_call") is not None:
        _check_function(message.child("function_call"))
    calls = message.values.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list) or len(calls) > MAX_CALLS:
        message.refuse("tool_calls", f"it must be a list of at most {MAX_CALLS} calls")
        return
    for index, call in enumerate(calls):
        _check_call(call, message.problems, f"{message.param('tool_calls')}[{index}]")


def _check_call(value: object, problems: Problems, path: str) -> None:
    if not isinstance(value, dict) or not isinstance(value.get("function"), dict):
        problems.add(path, f'{path} must be {{"type": "function", "id": "...", "function": {{...}}}}')
        return
    call = Fields(value, problems, path)
    _check_text(call, "id")
    if value.get("type") not in (None, "function"):
        call.refuse("type", 'it must be "function"')
    _check_function(call.child("function"))


def _check_function(function: Fields) -> None:
    name, arguments = function.values.get("name"), function.values.get("arguments")
    if not isinstance(name, str) or not name:
        function.refuse("name", "it must be the name of a tool")
    if arguments is not None and not isinstance(arguments, str | dict):
        function.refuse("arguments", "it must be JSON as a string, or an object")


def _check_content(message: Fields, *, may_be_null: bool) -> None:
    content = message.values.get("content")
    if isinstance(content, list) and content:
        for index, part in enumerate(content):
            _check_part(part, message.problems, f"{message.param('content')}[{index}]")
    elif not isinstance(content, str) and (content is not None or not may_be_null):
        message.refuse("content", "it must be a string or a list of text parts")


def _check_part(value: object, problems: Problems, path: str) -> None:
    if not (isinstance(value, dict) and value.get("type") == "text" and isinstance(value.get("text"), str)):
        problems.add(
            path, f'{path} must be {{"type": "text", "text": "..."}}; other kinds of part are not supported'
        )


def _check_text(fields: Fields, name: str) -> None:
    value = fields.values.get(name)
    if value is not None and not isinstance(value, str):
        fields.refuse(name, "it must be a string")


_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": ["string", "null"]},
        "type": {"enum": ["function", None]},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1},
                "arguments": {"type": ["string", "object", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": [*ROLES]},
        "content": {
            "anyOf": [{"type": ["string", "null"]}, {"type": "array", "minItems": 1, "items": _PART}]
        },
        "name": {"type": ["string", "null"]},
        "tool_call_id": {"type": ["string", "null"]},
        "tool_calls": {"type": ["array", "null"], "maxItems": MAX_CALLS, "items": _CALL},
        **{name: {"type": ["string", "null"]} for name in REASONING_FIELDS},
    },
    "required": ["role"],
}
MESSAGES = Parameter[list[dict[str, Any]]](
    "messages",
    "The conversation. Only an assistant's content may be null.",
    {"type": "array", "minItems": 1, "maxItems": MAX_MESSAGES, "items": _MESSAGE},
    read_messages,
    [],
    required=True,
)
