"""What a live server tells of its requests: metrics, a trace at an OTLP receiver, and its log as JSON."""

from __future__ import annotations

import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from live_server import client_of, eventually, serving
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.e2e]

SIM = (
    "--engine",
    "sim",
    "--sim-profile",
    "dynamo-mocker",
    "--local-prefill",
    "never",
    "--log-format",
    "json",
)
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "the-word-nobody-may-log"
MAX_TOKENS = 20
# Read by aiperf and by boards made for vLLM.
VLLM_NAMES = {
    "prefix_cache_queries", "prefix_cache_hits", "kv_cache_usage_perc", "num_requests_running",
    "num_requests_waiting", "num_preemptions", "prompt_tokens", "generation_tokens", "request_success",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
    "request_generation_tokens", "request_params_max_tokens", "iteration_tokens_total",
}  # fmt: skip
SAME_FOR_ALL = {"model_name", "engine"}  # labels


class Receiver:
    """Takes traces over OTLP; spans of the trace TRACE_ID, by name."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        self.url = ""

    async def take(self, request: web.Request) -> web.Response:
        told = ExportTraceServiceRequest.FromString(await request.read())
        for resource in told.resource_spans:
            for scope in resource.scope_spans:
                ours = [span for span in scope.spans if span.trace_id.hex() == TRACE_ID]
                self.spans.update((span.name, span) for span in ours)
        return web.Response()


@asynccontextmanager
async def receiver() -> AsyncIterator[Receiver]:
    receiver, app = Receiver(), web.Application()
    app.router.add_post("/v1/traces", receiver.take)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield receiver
    finally:
        await runner.cleanup()


async def stream(session: aiohttp.ClientSession) -> None:
    body = {
        "messages": [{"role": "user", "content": f"Say {SECRET} {SECRET} {SECRET}"}],
        "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True,
    }  # fmt: skip
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01", "X-Request-Id": "mine"}
    async with session.post("/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        await response.read()


async def cancel(session: aiohttp.ClientSession) -> None:
    body = {"prompt": "Go on", "max_tokens": 100, "ignore_eos": True, "stream": True}
    async with session.post("/v1/completions", json=body) as response:
        await response.content.readany()
        response.close()


async def samples(session: aiohttp.ClientSession) -> dict[str, float]:
    """By name and the values of the labels that are not the same for all."""
    async with session.get("/metrics") as response:
        text = await response.text()
    return {
        " ".join(
            [sample.name, *(value for key, value in sorted(sample.labels.items()) if key not in SAME_FOR_ALL)]
        ): (sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def all_ended(session: aiohttp.ClientSession) -> bool:
    return (await samples(session))["dynrt_open_requests"] == 0


def check_metrics(shown: dict[str, float]) -> None:
    """A probe of two tokens at the start, one stream of MAX_TOKENS, one that was left."""
    families = {name.split()[0] for name in shown}
    suffixes = ("", "_total", "_count")
    missing = {
        name for name in VLLM_NAMES if not any(f"vllm:{name}{suffix}" in families for suffix in suffixes)
    }
    assert missing == set()
    assert (shown["vllm:request_success_total length"], shown["vllm:request_success_total abort"]) == (2, 1)
    assert shown["vllm:request_generation_tokens_sum"] == 2 + MAX_TOKENS
    assert shown["vllm:generation_tokens_total"] > 2 + MAX_TOKENS, "those of the one that was left, too"
    assert shown["vllm:time_to_first_token_seconds_count"] == 3
    gaps = shown["vllm:generation_tokens_total"] - 3
    assert shown["vllm:inter_token_latency_seconds_count"] == shown["dynrt_inter_token_seconds_count"] == gaps
    parts = [shown[f"vllm:request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode")]
    assert all(part > 0 for part in parts)
    assert sum(parts) == pytest.approx(shown["vllm:e2e_request_latency_seconds_sum"], rel=0.01)
    assert shown["dynrt_http_requests_total /v1/chat/completions 200"] == 1
    assert shown["dynrt_http_connections"] >= 1


def check_trace(spans: dict[str, Any], model: str) -> None:
    assert set(spans) == {f"chat {model}", "plan", "queue", "prefill", "transfer", "decode"}
    request = spans.pop(f"chat {model}")
    assert request.parent_span_id.hex() == PARENT_ID
    values = {attribute.key: attribute.value for attribute in request.attributes}
    assert values["gen_ai.usage.output_tokens"].int_value == MAX_TOKENS
    assert values["gen_ai.response.id"].string_value == "mine"
    assert all(span.parent_span_id == request.span_id for span in spans.values())
    order = [spans[name].start_time_unix_nano for name in ("plan", "queue", "prefill", "decode")]
    assert order == sorted(order)
    assert SECRET not in str(spans) + str(request)


def check_log(lines: list[dict[str, Any]]) -> None:
    assert {line["level"] for line in lines} == {"INFO"}, "a normal end is no fault"
    assert {"dynrt.engine", "dynrt.http", "dynrt.fleet"} <= {line["logger"] for line in lines}
    access = [line for line in lines if line["msg"] == "request"]
    assert {line["path"] for line in access} == {"/v1/chat/completions", "/v1/completions", "/v1/models"}
    [mine] = [line for line in access if line["request"] == "mine"]
    assert (mine["trace_id"], mine["status"], mine["outcome"]) == (TRACE_ID, 200, "answered")
    assert mine["output_tokens"] == MAX_TOKENS and 0 < mine["ttft_s"] < mine["duration_s"]
    [left] = [line for line in access if line["path"] == "/v1/completions"]
    assert left["outcome"] == "client_left"


async def test_requests_are_told_of_in_metrics_trace_and_log(tiny_model_dir: Path, tmp_path: Path) -> None:
    options = (*SIM, "--otel")
    async with receiver() as otlp, serving(tmp_path / "log", tiny_model_dir, *options, otlp.url) as server:
        async with client_of(server.url) as session:
            await stream(session)
            await cancel(session)
            await eventually(lambda: all_ended(session))
            async with session.get("/v1/models") as response:
                model = (await response.json())["data"][0]["id"]
            check_metrics(await samples(session))
        server.signal(signal.SIGINT)
        assert await server.status() == 0
        check_trace(otlp.spans, model)
        assert SECRET not in server.log
        check_log([json.loads(line) for line in server.log.splitlines()])
