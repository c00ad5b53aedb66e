"""One server's answer to a request, whole or streamed, in a form in which two servers' answers can be compared."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

LOGPROB_TOLERANCE = 2e-3  # chunks of other sizes are summed in another order


async def whole_answer(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(path, json=body) as response:
        text = await response.text()
        assert response.status == 200, text
        answer = json.loads(text)
    [choice] = answer["choices"]
    return {
        "text": choice["text"] if "text" in choice else choice["message"]["content"],
        "finish_reason": choice["finish_reason"],
        "stop_reason": choice.get("stop_reason"),
        "token_ids": choice.get("token_ids"),
        "logprobs": _logprobs(choice),
        "prompt_logprobs": _prompt_logprobs(choice) if "prompt_logprobs" in body else None,
        "usage": _usage(answer),
    }


def _logprobs(choice: dict[str, Any]) -> Any:
    """Without a chat's bytes: dynrt tells none of special tokens, as these are no text."""
    logprobs = choice.get("logprobs")
    if logprobs is None or "content" not in logprobs:
        return logprobs
    return [
        (token["token"], token["logprob"], [(top["token"], top["logprob"]) for top in token["top_logprobs"]])
        for token in logprobs["content"]
    ]


def _prompt_logprobs(choice: dict[str, Any]) -> list[dict[str, float] | None]:
    """Without ranks: dynrt tells those of the likeliest tokens only."""
    return [
        position and {token_id: token["logprob"] for token_id, token in position.items()}
        for position in choice["prompt_logprobs"]
    ]


async def streamed_answer(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> dict[str, Any]:
    asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with session.post(path, json=asked) as response:
        assert response.status == 200, await response.text()
        lines = [line.decode().removeprefix("data: ").strip() async for line in response.content]
    events = [json.loads(line) for line in lines if line and not line.startswith(":") and line != "[DONE]"]
    assert "[DONE]" in lines
    choices = [event["choices"][0] for event in events if event["choices"]]
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content") for choice in choices]
    return {
        "text": "".join(text or "" for text in texts),
        "finish_reason": choices[-1]["finish_reason"],
        "stop_reason": choices[-1].get("stop_reason"),
        "token_ids": [token_id for choice in choices for token_id in choice.get("token_ids") or ()] or None,
        "usage": _usage(events[-1]),
    }


def _usage(answer: dict[str, Any]) -> tuple[int, int]:
    return answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Where two answers differ; numbers that are close are the same."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        found = [f"{where}: {key!r} is in one of them" for key in ours.keys() ^ theirs.keys()]
        for key in ours.keys() & theirs.keys():
            found += differences(ours[key], theirs[key], f"{where}.{key}")
        return found
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple) and len(ours) == len(theirs):
        pairs = zip(ours, theirs, strict=True)
        return [line for n, (a, b) in enumerate(pairs) for line in differences(a, b, f"{where}[{n}]")]
    if isinstance(ours, float) and isinstance(theirs, float) and abs(ours - theirs) <= LOGPROB_TOLERANCE:
        return []
    return [] if ours == theirs else [f"{where}: {ours!r} here, {theirs!r} there"]
