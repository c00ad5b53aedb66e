"""Run in an environment that holds anthropic and nothing of ours: prints what its client got, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Zurich?"}]
TOOL: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def text(client: anthropic.Anthropic, model: str) -> dict[str, Any]:
    """One question, whole and streamed."""
    arguments: dict[str, Any] = {
        "model": model, "messages": QUESTION, "system": "Be brief.", "max_tokens": 12, "extra_body": {"temperature": 0},
    }  # fmt: skip
    whole = client.messages.create(**arguments)
    with client.messages.stream(**arguments) as stream:
        pieces = list(stream.text_stream)
        streamed = stream.get_final_message()
    counted = client.messages.count_tokens(model=model, messages=QUESTION, system="Be brief.")
    return {
        "whole": [block.model_dump() for block in whole.content],
        "streamed": [block.model_dump() for block in streamed.content],
        "pieces": pieces,
        "stop_reasons": [whole.stop_reason, streamed.stop_reason],
        "counted": counted.input_tokens,
        "prompts": [
            message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
            for message in (whole, streamed)
        ],
        "output_tokens": [whole.usage.output_tokens, streamed.usage.output_tokens],
    }


def tools(client: anthropic.Anthropic, model: str) -> dict[str, Any]:
    """A call, streamed, and its result sent back."""
    arguments: dict[str, Any] = {
        "model": model, "max_tokens": 48, "extra_body": {"temperature": 0}, "tools": [TOOL],
    }  # fmt: skip
    with client.messages.stream(messages=QUESTION, **arguments) as stream:
        events = [event.type for event in stream]
        message = stream.get_final_message()
    calls = [block for block in message.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "18 °C"} for call in calls]
    turns = [
        *QUESTION,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    after = client.messages.create(messages=turns, **arguments)
    return {
        "events": sorted(set(events)),
        "content": [block.model_dump() for block in message.content],
        "stop_reason": message.stop_reason,
        "after": after.stop_reason,
    }


def errors(client: anthropic.Anthropic, model: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {"model": model, "messages": QUESTION, "max_tokens": 4}
    changes: dict[str, Any] = {"unknown_model": {"model": "claude"}, "no_room": {"max_tokens": 20_000}}
    shown = {}
    for name, change in changes.items():
        try:
            client.messages.create(**arguments | change)
        except anthropic.APIStatusError as error:
            shown[name] = {"class": type(error).__name__, "text": str(error)}
    return shown


def broken_stream(client: anthropic.Anthropic, model: str) -> dict[str, Any]:
    """A stream that the server ends with an error."""
    pieces: list[str] = []
    try:
        with client.messages.stream(model=model, messages=QUESTION, max_tokens=4) as stream:
            pieces += stream.text_stream
    except anthropic.APIStatusError as error:
        return {"pieces": pieces, "text": str(error)}
    return {"pieces": pieces, "text": None}


def main(call: str, url: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)
    print(json.dumps(globals()[call](client, model)))


if __name__ == "__main__":
    main(*sys.argv[1:])
