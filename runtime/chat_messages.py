"""OpenAI chat messages in the form that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from dynrt.runtime.errors import InvalidRequestError

REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")

Message = dict[str, Any]


def template_messages(
    messages: Sequence[Mapping[str, Any]], *, wants_parts: bool, knows_developer: bool
) -> list[Message]:
    """Messages for a template: no nulls, content as text (or as text parts where it `wants_parts`), tool arguments
    as objects, and `developer` as `system` unless the template knows that role."""
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message", param="messages")
    return [
        message
        if not wants_parts and is_plain(message)
        else _adapted(message, f"messages[{index}]", wants_parts, knows_developer)
        for index, message in enumerate(messages)
    ]


def is_plain(message: object) -> TypeGuard[Message]:
    """Whether it is a role that all know and a text, nothing else, as most are: templates take it as it is."""
    return (
        isinstance(message, dict)
        and len(message) == 2
        and message.get("role") in ("system", "user", "assistant")
        and isinstance(message.get("content"), str)
    )


def _adapted(message: Mapping[str, Any], param: str, wants_parts: bool, knows_developer: bool) -> Message:
    clean = _with_reasoning({key: value for key, value in message.items() if value is not None})
    texts = _texts(message.get("content"), f"{param}.content")
    clean["content"] = _parts(texts) if wants_parts else "\n".join(texts)
    if clean.get("role") == "developer" and not knows_developer:
        clean["role"] = "system"
    _without_functions(clean)
    if "tool_calls" in clean:
        clean["tool_calls"] = _tool_calls(clean["tool_calls"], f"{param}.tool_calls")
    return clean


def _with_reasoning(message: Message) -> Message:
    """What an assistant thought has three names among clients, two of which templates read."""
    reasoning = next((message[name] for name in REASONING_NAMES if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _without_functions(message: Message) -> None:
    """The names of tools and their calls from before tools were called so, which no template knows."""
    if message.get("role") == "function":
        message["role"] = "tool"
    call = message.pop("function_call", None)
    if call is not None and "tool_calls" not in message:
        message["tool_calls"] = [{"type": "function", "function": call}]


def _texts(content: Any, param: str) -> list[str]:
    """Null content (an assistant's turn of tool calls) is empty text: most templates concatenate it."""
    if content is None:
        return [""]
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return [_text_of(part, f"{param}[{index}]") for index, part in enumerate(content)]
    raise InvalidRequestError(f"{param} is neither text nor a list of parts", param=param)


def _text_of(part: Any, param: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind != "text" or not isinstance(text, str):
        raise InvalidRequestError(f"{param} is of type {kind!r}; only text parts are supported", param=param)
    return text


def _parts(texts: list[str]) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


def _tool_calls(calls: Any, param: str) -> list[Message]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise InvalidRequestError(f"{param} is no list of objects", param=param)
    return [_with_object_arguments(call) for call in calls]


def _with_object_arguments(call: Mapping[str, Any]) -> Message:
    """Clients send arguments as JSON text; templates apply tojson to them, or walk through them."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)  # what a model once wrote need not be JSON; it is shown as it is
    return {**call, "function": {**function, "arguments": arguments}}
