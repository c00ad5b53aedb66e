"""Run in an environment that holds litellm and nothing of ours: prints what it got, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm

QUESTION = "What is the capital of France?"


def asked(url: str, model: str, content: str = QUESTION, **fields: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return litellm.completion(
        model=model, messages=messages, api_base=f"{url}/v1", api_key="unused",
        **{"max_tokens": 24, "temperature": 0, "max_retries": 0, **fields},
    )  # fmt: skip


def chat(url: str, model: str) -> dict[str, Any]:
    whole = asked(url, model)
    chunks = list(asked(url, model, stream=True, stream_options={"include_usage": True}))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return {
        "texts": [
            whole.choices[0].message.content,
            "".join(choice.delta.content or "" for choice in choices),
        ],
        "finish": [whole.choices[0].finish_reason, choices[-1].finish_reason],
        "usage": [whole.usage.total_tokens, chunks[-1].usage.total_tokens],
    }


def choices(url: str, model: str) -> dict[str, Any]:
    answer = asked(url, model, n=2, seed=5, temperature=1, logprobs=True, top_logprobs=2)
    return {
        "texts": [choice.message.content for choice in answer.choices],
        "spelled": [
            bytes(byte for token in choice.logprobs.content for byte in token.bytes).decode()
            for choice in answer.choices
        ],
    }


def errors(url: str, model: str) -> dict[str, Any]:
    """What litellm takes refusals for: its proxy decides by this where to send a request next."""
    attempts: dict[str, dict[str, Any]] = {
        "prompt_too_long": {"content": "word " * 9000},
        "no_room": {"max_tokens": 1_000_000},
        "no_room_to_stream": {"max_tokens": 1_000_000, "stream": True},
        "unknown_model": {"model": model.replace("smollm2-135m", "gpt-9")},
        "bad_value": {"temperature": -3},
    }
    told = {}
    for name, fields in attempts.items():
        try:
            asked(**{"url": url, "model": model, **fields})
        except Exception as error:  # whatever it is: the test looks
            told[name] = {"class": type(error).__name__, "text": str(error)}
    return told


def everything(url: str, model: str) -> dict[str, Any]:
    """All of these: importing litellm takes seconds."""
    return {call.__name__: call(url, model) for call in (chat, choices, errors)}


def main(url: str, *models: str) -> None:
    litellm.suppress_debug_info = True
    print(json.dumps({model: everything(url, model) for model in models}))


if __name__ == "__main__":
    main(*sys.argv[1:])
