"""Bad input over HTTP: refused with a message that names value and limit, and the server goes on; /metrics parses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from live_server import client_of, complete, prompt, serving
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

CONTEXT = 2048  # of the tiny model

PROMISED_METRICS = {  # families, without _total
    "dynrt_handoffs": "counter",
    "dynrt_handoff_exposed_seconds": "histogram",
    "dynrt_kv_bytes_pushed": "counter",
    "dynrt_prefill_tokens": "counter",
    "dynrt_plans": "counter",
    "dynrt_requests": "counter",
    "dynrt_ttft_seconds": "histogram",
    "dynrt_workers": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def session(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    log = tmp_path_factory.mktemp("bad-input") / "log"
    async with serving(log, tiny_model_dir) as server, client_of(server.url) as session:
        yield session


COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]

REFUSALS = [  # path, body, status, param, what the message names
    (COMPLETIONS, {"prompt": [7] * CONTEXT}, 400, "prompt", ("2048 tokens", "at most 2047")),
    (COMPLETIONS, {"prompt": [7] * 9000}, 400, "prompt", ("9000 tokens", "2048 tokens")),
    (COMPLETIONS, {"prompt": [7] * 2000, "max_tokens": 49}, 400, "max_tokens", ("49", "2000", "at most 48")),
    (CHAT, {"messages": [{"role": "user", "content": "a b " * 3000}]}, 400, "messages", ("2048 tokens",)),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", ('""', "not empty")),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", ("a list of 0", "not empty")),
    (COMPLETIONS, {"prompt": [512]}, 400, "prompt", ("512", "0 to 511")),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt", ("no id negative",)),
    (CHAT, {"messages": []}, 400, "messages", ("a list of 0", "at least one")),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", ("0", "at least 1")),
    (COMPLETIONS, {"prompt": "a", "max_tokens": -5}, 400, "max_tokens", ("-5", "at least 1")),
    (COMPLETIONS, {"prompt": "a", "max_tokens": "many"}, 400, "max_tokens", ('"many"',)),
    (COMPLETIONS, {"prompt": "a", "temperature": 2.5}, 400, "temperature", ("2.5", "2")),
    (COMPLETIONS, {"prompt": "a", "temperature": "hot"}, 400, "temperature", ('"hot"',)),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400, None, ("NaN", "finite number")),
    (COMPLETIONS, b'{"prompt": "a", ', 400, None, ("not valid JSON",)),
    (COMPLETIONS, b"[]", 400, None, ("not an object",)),
    (COMPLETIONS, b"", 400, None, ("empty",)),
    (COMPLETIONS, b'{"prompt": "\xff"}', 400, None, ("UTF-8",)),
    (COMPLETIONS, {"prompt": "a", "n": 129}, 400, "n", ("129", "128")),
    (COMPLETIONS, {"prompt": "a", "model": "gpt-9"}, 404, "model", ('"gpt-9"', "llama")),
    (CHAT, {"messages": HELLO, "model": "gpt-9"}, 404, "model", ('"gpt-9"', "llama")),
    (CHAT, {"messages": "hello"}, 400, "messages", ('"hello"', "a list")),
    (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role", ('"wizard"',)),
    ("/v1/embeddings", {"input": "a"}, 501, None, ("embeddings are not built",)),
]


@pytest.mark.parametrize(("path", "body", "status", "param", "named"), REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals(
    session: aiohttp.ClientSession,
    path: str,
    body: Any,
    status: int,
    param: str | None,
    named: tuple[str, ...],
    stream: bool,
) -> None:
    raw = body if isinstance(body, bytes) else json.dumps({**body, "stream": stream}).encode()
    headers = {"Content-Type": "application/json"}
    async with session.post(path, data=raw, headers=headers) as response:
        answer = await response.json()
    assert response.status == status, answer
    assert set(answer) == {"error"} and set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["param"] == param
    for name in named:
        assert name in answer["error"]["message"]


async def test_the_server_goes_on(session: aiohttp.ClientSession) -> None:
    assert await complete(session, prompt(20), 5)


async def test_a_get_where_a_post_belongs(session: aiohttp.ClientSession) -> None:
    async with session.get(CHAT) as response:
        answer = await response.json()
    assert (response.status, response.headers["Allow"]) == (405, "POST")
    assert "POST" in answer["error"]["message"]


def counted(family: Metric) -> list[Sample]:
    return [sample for sample in family.samples if sample.name.endswith("_total")]


async def test_metrics_parse(session: aiohttp.ClientSession) -> None:
    await complete(session, prompt(100), 5)
    async with session.get("/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    assert PROMISED_METRICS.items() <= {name: family.type for name, family in families.items()}.items()
    outcomes = {sample.labels["outcome"] for sample in counted(families["dynrt_handoffs"])}
    assert outcomes == {"committed", "cancelled", "fenced", "failed"}
    sources = {sample.labels["source"] for sample in counted(families["dynrt_prefill_tokens"])}
    assert sources == {"computed", "cached"}
    ended = {sample.labels["outcome"]: sample.value for sample in counted(families["dynrt_requests"])}
    assert {outcome for outcome, count in ended.items() if count} == {"finished"}, (
        "refused ones are none, and ours were read to their end"
    )
    kinds = {sample.labels["kind"] for sample in counted(families["dynrt_plans"])}
    assert kinds == {"remote", "local"}
    [ttft_count] = [s.value for s in families["dynrt_ttft_seconds"].samples if s.name.endswith("_count")]
    assert ttft_count >= 2, "the start's own request and ours"
