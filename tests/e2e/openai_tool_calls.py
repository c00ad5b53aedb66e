"""Run in an environment that holds openai and nothing of ours: prints what its client got of tools and responses."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Zurich?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": SCHEMA,
}


def chat(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """A call, whole and streamed, and its result sent back."""
    arguments: dict[str, Any] = {
        "model": model, "max_tokens": 48, "temperature": 0,
        "tools": [{"type": "function", "function": {**FUNCTION, "strict": True}}],
    }  # fmt: skip
    whole = client.chat.completions.create(messages=QUESTION, **arguments).choices[0]
    with client.chat.completions.stream(messages=QUESTION, **arguments) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_completion().choices[0]
    calls = whole.message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": call.id, "content": "18 °C"} for call in calls]
    turns = [*QUESTION, whole.message.model_dump(exclude_none=True), *results]
    after = client.chat.completions.create(messages=turns, **arguments).choices[0]
    return {
        "whole": shown(whole),
        "streamed": shown(streamed),
        "events": sorted(set(events)),
        "after": after.finish_reason,
    }


def shown(choice: Any) -> dict[str, Any]:
    message = choice.message
    return {
        "content": message.content,
        "reasoning": getattr(message, "reasoning_content", None),
        "calls": [[call.function.name, call.function.arguments] for call in message.tool_calls or []],
        "finish": choice.finish_reason,
    }


def forced_chat(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """A call that is required, streamed."""
    with client.chat.completions.stream(
        model=model, messages=QUESTION, max_tokens=48, temperature=0, tool_choice="required",
        tools=[{"type": "function", "function": {**FUNCTION, "strict": True}}],
    ) as stream:  # fmt: skip
        return shown(stream.get_final_completion().choices[0])


def response(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """A response, whole and streamed, and with what it said sent back."""
    arguments: dict[str, Any] = {
        "model": model, "instructions": "Be brief.", "max_output_tokens": 48, "temperature": 0,
        "tools": [{"type": "function", **FUNCTION, "strict": True}],
    }  # fmt: skip
    whole = client.responses.create(input=QUESTION, **arguments)
    with client.responses.stream(input=QUESTION, **arguments) as stream:
        events = [event.type for event in stream]
        last = stream.get_final_response()
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "18 °C"}
        for item in whole.output
        if item.type == "function_call"
    ]
    items = [item.model_dump(exclude_none=True) for item in whole.output]
    after = client.responses.create(input=[*QUESTION, *items, *results], **arguments)
    return {
        "whole": [item.type for item in whole.output],
        "streamed": [item.type for item in last.output],
        "texts": [whole.output_text, last.output_text],
        "calls": [
            [item.name, item.arguments]
            for one in (whole, last)
            for item in one.output
            if item.type == "function_call"
        ],
        "events": events,
        "statuses": [whole.status, last.status, after.status],
        "usage": [one.usage.total_tokens for one in (whole, last) if one.usage],
    }


def response_text(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """A response to a question alone, whole and streamed."""
    arguments: dict[str, Any] = {"model": model, "input": "What is the capital of France?", "temperature": 0}
    whole = client.responses.create(**arguments)
    with client.responses.stream(**arguments) as stream:
        streamed = stream.get_final_response()
    return {"whole": whole.output_text, "streamed": streamed.output_text, "status": streamed.status}


def response_errors(client: openai.OpenAI, model: str) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "stored": {"previous_response_id": "resp_1"},
        "background": {"background": True},
    }
    told = {}
    for name, change in changes.items():
        try:
            client.responses.create(model=model, input="hi", **change)
        except openai.BadRequestError as error:
            told[name] = {"text": str(error), "param": error.param}
    return told


def broken_stream(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """A response's stream that the server ends with an error."""
    deltas: list[str] = []
    try:
        events = client.responses.create(model=model, input="hi", stream=True)
        deltas.extend(event.delta for event in events if event.type == "response.output_text.delta")
    except openai.APIError as error:
        return {"deltas": deltas, "text": str(error)}
    return {"deltas": deltas, "text": None}


def main(call: str, url: str, model: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    print(json.dumps(globals()[call](client, model)))


if __name__ == "__main__":
    main(*sys.argv[1:])
