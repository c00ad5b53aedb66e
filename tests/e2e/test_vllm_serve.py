"""`dynrt serve --engine vllm` with the default model, through HTTP: each prompt is handed off from engine to engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from live_server import Command, client_of, complete, completion
from oracle import Oracle, Reference, assert_judged_right
from prometheus_client.parser import text_string_to_metric_families
from prompt_set import language_prompts
from vllm_serving import MARKS, serve_command

pytestmark = [*MARKS, pytest.mark.asyncio(loop_scope="module")]

ANSWER_S = 300.0
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> AsyncIterator[Command]:
    log = tmp_path_factory.mktemp("serve") / "log"
    options = ["--max-batch-tokens", 256, "--engine-arg", "max_model_len=2048"]
    async with serve_command(log, default_model_dir, *options) as server:
        yield server


@pytest_asyncio.fixture(loop_scope="module")
async def session(server: Command) -> AsyncIterator[aiohttp.ClientSession]:
    async with client_of(server.url) as session:
        session._timeout = aiohttp.ClientTimeout(ANSWER_S)
        yield session


async def post(session: aiohttp.ClientSession, path: str, **body: Any) -> dict[str, Any]:
    async with session.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        answer: dict[str, Any] = await response.json()
        return answer


async def chat(session: aiohttp.ClientSession, **fields: Any) -> dict[str, Any]:
    body = {"messages": QUESTION, "max_tokens": 24, "temperature": 0, **fields}
    choice: dict[str, Any] = (await post(session, "/v1/chat/completions", **body))["choices"][0]
    return choice


async def test_what_was_passed_to_vllm_is_logged(server: Command) -> None:
    assert "vLLM is given engine_args=\"{'max_model_len': 2048}\"" in server.log


async def test_tokens_are_what_transformers_answers(
    session: aiohttp.ClientSession, default_model_dir: Path
) -> None:
    prompts = {name: ids for name, ids in language_prompts(default_model_dir).items() if len(ids) <= 300}
    assert len(prompts) >= 8
    bodies = [completion(ids, 24, return_token_ids=True) for ids in prompts.values()]
    answers = await asyncio.gather(*(post(session, "/v1/completions", **body) for body in bodies))
    oracle = Oracle(default_model_dir)
    for (name, prompt_ids), answer in zip(prompts.items(), answers, strict=True):
        output_ids = answer["choices"][0]["token_ids"]
        assert len(output_ids) == 24
        judgement = oracle.judge(prompt_ids, output_ids)
        assert_judged_right(name, Reference(prompt_ids, output_ids, judgement))


async def test_streamed_is_whole_and_stops_in_text(session: aiohttp.ClientSession) -> None:
    whole = await chat(session)
    text = whole["message"]["content"]
    assert "Paris" in text and whole["finish_reason"] == "stop"
    for stop in (text[3:8], text[:2]):  # across the first token that decode sampled, and in it
        stopped = await chat(session, stop=stop)
        assert stopped["message"]["content"] == text[: text.index(stop)]
        assert stopped["finish_reason"] == "stop"
    ids = list(range(1000, 1050))
    streamed = await complete(session, ids, 16)
    assert streamed == (await post(session, "/v1/completions", **completion(ids, 16)))["choices"][0]["text"]


async def test_seed_and_log_probabilities(session: aiohttp.ClientSession) -> None:
    hot = {"temperature": 1.2, "top_p": 0.95, "ignore_eos": True}
    drawn = [(await chat(session, seed=seed, **hot))["message"]["content"] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    told = (await chat(session, logprobs=True, top_logprobs=3))["logprobs"]["content"]
    assert len(told) > 3 and all(len(token["top_logprobs"]) == 3 for token in told)
    assert all(token["logprob"] == token["top_logprobs"][0]["logprob"] for token in told), "greedy"


async def test_structured_output(session: aiohttp.ClientSession) -> None:
    properties = {"city": {"type": "string", "maxLength": 12}, "in_europe": {"type": "boolean"}}
    schema = {
        "type": "object", "properties": properties, "required": [*properties], "additionalProperties": False,
    }  # fmt: skip
    asked = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    answer = await chat(session, max_tokens=60, response_format=asked)
    assert set(json.loads(answer["message"]["content"])) == {"city", "in_europe"}


async def test_all_of_it_was_handed_off(session: aiohttp.ClientSession) -> None:
    async with session.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    values = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families
        for sample in family.samples
    }
    num_remote = values["dynrt_plans_total", "remote"]
    assert values["dynrt_handoffs_total", "committed"] == num_remote > 1, "one is that of the start's probe"
    assert values["dynrt_handoffs_total", "failed"] == values["dynrt_handoffs_total", "fenced"] == 0
    assert values["dynrt_plans_total", "local"] == 0
