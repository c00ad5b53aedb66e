"""Through the HTTP endpoint of a pair of engines: usage and /metrics say what was computed, found and sent."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from prompt_set import random_ids
from served_runtime import ServedRuntime, serve

from dynrt.runtime import RuntimeConfig
from dynrt.runtime.http.transport.server import HttpServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

REQUEST_LIMIT_S = 100.0
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tiny_model_dir: Path) -> AsyncIterator[ServedRuntime]:
    config = RuntimeConfig(model=str(tiny_model_dir), dtype="float32", local_prefill="never")
    async with serve(config) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: ServedRuntime) -> AsyncIterator[aiohttp.ClientSession]:
    server = HttpServer(served.runtime)
    await server.start(port=0)
    timeout = aiohttp.ClientTimeout(REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(server.url, timeout=timeout, raise_for_status=True) as client:
        yield client
    await server.stop(drain_s=0)


async def complete(client: aiohttp.ClientSession, path: str, **body: Any) -> dict[str, Any]:
    async with client.post(path, json={**GREEDY, **body}) as response:
        answer: dict[str, Any] = await response.json()
        return answer


async def stream(client: aiohttp.ClientSession, path: str, **body: Any) -> list[dict[str, Any]]:
    """The stream's chunks; the last one has the usage."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with client.post(path, json={**GREEDY, **options, **body}) as response:
        events = [line.removeprefix(b"data: ") async for line in response.content if line.strip()]
    assert events.pop().strip() == b"[DONE]"
    return [json.loads(event) for event in events]


async def prefill_tokens(client: aiohttp.ClientSession) -> dict[str, float]:
    """By source, as /metrics tells it."""
    async with client.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
        samples = [sample for family in families for sample in family.samples]
    return {
        sample.labels["source"]: sample.value
        for sample in samples
        if sample.name == "dynrt_prefill_tokens_total"
    }


async def test_a_second_request_with_the_same_1000_tokens_shows_the_hit(
    client: aiohttp.ClientSession,
) -> None:
    rng = random.Random(1)
    prefix = random_ids(rng, 1000)
    prompts = [prefix + random_ids(rng, 40) for _ in range(2)]
    hit = 31 * 32  # full blocks of the prefix; the 32nd block begins in it and ends in what differs
    first = await complete(client, "/v1/completions", prompt=prompts[0])
    before = await prefill_tokens(client)
    second = await complete(client, "/v1/completions", prompt=prompts[1])
    after = await prefill_tokens(client)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"] == {
        "prompt_tokens": 1040,
        "completion_tokens": 8,
        "total_tokens": 1048,
        "prompt_tokens_details": {"cached_tokens": hit},
    }
    assert after["cached"] - before["cached"] == hit
    assert after["computed"] - before["computed"] == 1040 - hit


async def test_chat_streamed_and_whole(client: aiohttp.ClientSession, served: ServedRuntime) -> None:
    messages = [{"role": "system", "content": "You sell apples."}, {"role": "user", "content": "How many?"}]
    num_tokens = len(await served.runtime.encode_chat(messages)) // 4
    whole = await complete(client, "/v1/chat/completions", messages=messages, max_tokens=30)
    chunks = await stream(client, "/v1/chat/completions", messages=messages, max_tokens=30)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("content", "") for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:-1]] == ["length"]
    for usage in (whole["usage"], chunks[-1]["usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_tokens, 30)


async def test_text_over_http_is_the_runtimes(client: aiohttp.ClientSession, served: ServedRuntime) -> None:
    prompt_ids = random_ids(random.Random(2), 70)
    expected = await served.answer(prompt_ids, max_tokens=40)
    whole = await complete(client, "/v1/completions", prompt=prompt_ids, max_tokens=40)
    chunks = await stream(client, "/v1/completions", prompt=prompt_ids, max_tokens=40)
    assert whole["choices"][0]["text"] == expected.text
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == expected.text


async def test_usage_of_answers_that_end_at_the_first_token(
    client: aiohttp.ClientSession, served: ServedRuntime
) -> None:
    prompt_ids = random_ids(random.Random(3), 50)
    (first_id,) = (await served.answer(prompt_ids, max_tokens=1)).token_ids
    for ending in ({"max_tokens": 1}, {"stop_token_ids": [first_id]}):
        answer = await complete(client, "/v1/completions", prompt=prompt_ids, **ending)
        assert answer["usage"]["completion_tokens"] == 1
        assert answer["usage"]["total_tokens"] == 51
