"""Run in an environment that holds langchain-openai and nothing of ours: prints what its client got, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

QUESTION = "What is the capital of France?"


@tool
def get_weather(city: str) -> str:
    """The weather in a city"""
    return f"18 °C in {city}"


def chat(model: ChatOpenAI) -> dict[str, Any]:
    """One question, whole, streamed, and streamed on a loop."""
    whole = model.invoke(QUESTION)
    streamed = joined(list(model.stream(QUESTION)))
    return {
        "texts": [whole.text, streamed.text, asyncio.run(streamed_on_a_loop(model))],
        "usage": [of_usage(whole), of_usage(streamed)],
        "finish": [message.response_metadata["finish_reason"] for message in (whole, streamed)],
    }


def joined(chunks: list[AIMessageChunk]) -> AIMessageChunk:
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    return whole


async def streamed_on_a_loop(model: ChatOpenAI) -> str:
    return "".join([chunk.text async for chunk in model.astream(QUESTION)])


def of_usage(message: AIMessage) -> list[int]:
    usage = message.usage_metadata
    return [usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]] if usage else []


def batch(model: ChatOpenAI) -> list[str]:
    return [answer.text for answer in model.batch([QUESTION, "What is 2 + 2?"])]


def structured(model: ChatOpenAI) -> list[dict[str, Any]]:
    """By a grammar of its own, and as the arguments of a required call."""
    properties = {"city": {"type": "string", "maxLength": 12}, "in_europe": {"type": "boolean"}}
    schema = {
        "title": "city", "description": "A city", "type": "object", "properties": properties,
        "required": [*properties], "additionalProperties": False,
    }  # fmt: skip
    longer = model.model_copy(update={"max_tokens": 80})
    return [
        longer.with_structured_output(schema, method=method).invoke(QUESTION)
        for method in ("json_schema", "function_calling")
    ]


def tools(model: ChatOpenAI) -> dict[str, Any]:
    """Calls, whole and streamed, and their result sent back."""
    bound = model.bind_tools([get_weather])
    question = ("human", "What is the weather in Zurich?")
    whole = bound.invoke([question])
    streamed = joined(list(bound.stream([question])))
    results = [
        ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"]) for call in whole.tool_calls
    ]
    after = bound.invoke([question, whole, *results])
    return {
        "texts": [whole.text, streamed.text],
        "calls": [[[call["name"], call["args"]] for call in one.tool_calls] for one in (whole, streamed)],
        "invalid": whole.invalid_tool_calls + streamed.invalid_tool_calls,
        "after": after.text,
    }


def errors(model: ChatOpenAI) -> dict[str, Any]:
    told = {}
    for name, changes, text in (
        ("prompt_too_long", {}, "word " * 9000),
        ("unknown_model", {"model_name": "gpt-9"}, QUESTION),
    ):
        try:
            model.model_copy(update=changes).invoke(text)
        except Exception as error:  # whatever it is: the test looks
            told[name] = {"overflow": isinstance(error, ContextOverflowError), "text": str(error)}
    return told


def main(call: str, url: str, name: str) -> None:
    model = ChatOpenAI(
        base_url=f"{url}/v1", api_key="unused", max_retries=0,
        model=name, temperature=0, max_tokens=24, stream_usage=True,
    )  # fmt: skip
    print(json.dumps(globals()[call](model)))


if __name__ == "__main__":
    main(*sys.argv[1:])
