"""Run by test_clients in an environment that holds openai and nothing of ours: prints what its client got, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import openai

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def models(client: openai.OpenAI, model: str) -> dict[str, Any]:
    return {
        "listed": [one.id for one in client.models.list()],
        "retrieved": client.models.retrieve(model).id,
    }


def chat(client: openai.OpenAI, model: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": model, "messages": QUESTION, "max_completion_tokens": 24, "temperature": 0,
    }  # fmt: skip
    whole = client.chat.completions.create(**arguments)
    stream = client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    return {
        "whole": whole.choices[0].message.content,
        "streamed": "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices),
        "finish": [whole.choices[0].finish_reason, chunks[-2].choices[0].finish_reason],
        "usage": [usage.total_tokens for usage in (whole.usage, chunks[-1].usage) if usage],
    }


def completion(client: openai.OpenAI, model: str) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": model, "prompt": "Paris is the", "max_tokens": 12, "temperature": 0, "stop": "\n",
    }  # fmt: skip
    whole = client.completions.create(**arguments)
    stream = client.completions.create(**arguments, stream=True)
    return {
        "whole": whole.choices[0].text,
        "streamed": "".join(chunk.choices[0].text for chunk in stream),
    }


def errors(client: openai.OpenAI, model: str) -> dict[str, Any]:
    shown = {}
    for name, changes in (("too_long", {"max_tokens": 10**6}), ("unknown_model", {"model": "gpt-9"})):
        try:
            client.chat.completions.create(**{"model": model, "messages": QUESTION, **changes})
        except openai.APIStatusError as error:
            shown[name] = {
                "class": type(error).__name__, "text": str(error), "code": error.code, "param": error.param,
            }  # fmt: skip
    return shown


def leave(client: openai.OpenAI, model: str) -> dict[str, Any]:
    stream = client.completions.create(
        model=model, prompt="Once", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
    )
    first = next(iter(stream))
    stream.close()
    return {"first": first.choices[0].text}


def main(call: str, url: str, model: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    print(json.dumps(globals()[call](client, model)))


if __name__ == "__main__":
    main(*sys.argv[1:])
