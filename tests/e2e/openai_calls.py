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


def choices(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """Two prompts of two choices each, whole and streamed, and one of these choices by itself."""
    arguments: dict[str, Any] = {
        "model": model, "max_tokens": 6, "seed": 5, "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    prompts = ["Paris is the", "Once upon a"]
    whole = client.completions.create(**arguments, prompt=prompts, n=2)
    streamed = [""] * 4
    for chunk in client.completions.create(**arguments, prompt=prompts, n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    alone = client.completions.create(**arguments, prompt=prompts[1])
    return {
        "whole": [choice.text for choice in whole.choices],
        "indices": [choice.index for choice in whole.choices],
        "streamed": streamed,
        "alone": alone.choices[0].text,
        "tokens": whole.usage.completion_tokens if whole.usage else None,
    }


def logprobs(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """Of a chat with an emoji in it, and of a prompt that is echoed."""
    messages: list[Any] = [
        {"role": "user", "content": "Repeat: 🦜 é"},
        {"role": "assistant", "content": "🦜"},
    ]
    answer = client.chat.completions.create(
        model=model,
        messages=[*messages, QUESTION[0]],
        max_tokens=8,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
    ).choices[0]
    tokens = (answer.logprobs and answer.logprobs.content) or []
    echo = client.completions.create(
        model=model, prompt="Paris is the 🦜", max_tokens=1, temperature=0, echo=True, logprobs=1
    ).choices[0]
    return {
        "text": answer.message.content,
        "spelled": bytes(byte for token in tokens for byte in token.bytes or ()).decode(),
        "greedy": [token.logprob == max(one.logprob for one in token.top_logprobs) for token in tokens],
        "echo": echo.text,
        "of_echo": echo.logprobs.model_dump() if echo.logprobs else None,
    }


def token_ids(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """Of a text that a stop string ends, whole and streamed, and what they spell."""
    arguments: dict[str, Any] = {
        "model": model, "prompt": "Paris is the", "max_tokens": 12, "temperature": 0, "stop": "gest an",
        "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    whole = client.completions.create(**arguments).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**arguments, stream=True)]
    ids: list[int] = extra(whole, "token_ids")
    return {
        "texts": [whole.text, "".join(part.text for part in parts)],
        "ids": [ids, [token_id for part in parts for token_id in extra(part, "token_ids") or ()]],
        "spelled": asked(client, "detokenize", model=model, tokens=ids)["prompt"],
        "stop_reason": extra(whole, "stop_reason"),
    }


def half_a_character(client: openai.OpenAI, model: str) -> dict[str, Any]:
    """The answer is the first byte of a parrot, whole and streamed."""
    parrot = asked(client, "tokenize", model=model, prompt="🦜", add_special_tokens=False)["tokens"]
    arguments: dict[str, Any] = {
        "model": model, "prompt": "Repeat: ", "max_tokens": 1, "logit_bias": {str(parrot[0]): 100}, "logprobs": 0,
    }  # fmt: skip
    whole = client.completions.create(**arguments).choices[0]
    parts = [chunk.choices[0] for chunk in client.completions.create(**arguments, stream=True)]
    return {
        "texts": [whole.text, "".join(part.text for part in parts)],
        "token": whole.logprobs and whole.logprobs.tokens,
        "parrot": len(parrot),
    }


def extra(model: Any, name: str) -> Any:
    """A field that OpenAI has not."""
    return (model.model_extra or {}).get(name)


def asked(client: openai.OpenAI, route: str, **body: Any) -> Any:
    """Of a route beside OpenAI's."""
    return client.post(str(client.base_url.copy_with(path=f"/{route}")), cast_to=object, body=body)


def structured(client: openai.OpenAI, model: str) -> dict[str, Any]:
    properties = {"city": {"type": "string", "maxLength": 12}, "in_europe": {"type": "boolean"}}
    schema = {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
    }  # fmt: skip
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = client.chat.completions.create(
        model=model, messages=QUESTION, max_tokens=60, temperature=0, response_format=response_format
    ).choices[0]
    return {"parsed": json.loads(answer.message.content or ""), "finish": answer.finish_reason}


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
