"""The default model, greedy in float32: the same tokens disaggregated, aggregated and by transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from oracle import References, assert_all_same, assert_judged_right, judged
from prompt_set import BLOCK_SIZE, language_prompts
from served_runtime import Answer, ServedRuntime, serve
from tokenizers import Tokenizer

from dynrt.runtime import RuntimeConfig
from dynrt.runtime.http.transport.server import HttpServer

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

BLOCK_BYTES = 30 * 2 * BLOCK_SIZE * 3 * 64 * 4  # layers, K and V, tokens, KV heads, head size, float32
GREEDY = {"max_tokens": 64, "temperature": 0, "ignore_eos": True}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def references(default_model_dir: Path) -> References:
    """The answers of one engine that does everything, all asked at once."""
    prompts = language_prompts(default_model_dir)
    async with serve(RuntimeConfig(dtype="float32", prefill=0, decode=1)) as aggregated:
        answers = await aggregated.answers(prompts)
    return judged(default_model_dir, prompts, answers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(references: References) -> AsyncIterator[ServedRuntime]:
    """Started behind the references, so that fewer copies of the model are in memory at once."""
    async with serve(RuntimeConfig(dtype="float32", local_prefill="never")) as served:
        yield served


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def disaggregated(pair: ServedRuntime, references: References) -> dict[str, Answer]:
    """The answers of a pair of engines that has seen no prompt before, all asked at once."""
    answers = await pair.answers(prompts_of(references))
    await pair.settle()
    assert pair.metric("dynrt_handoffs_total", outcome="committed") == len(references)
    assert pair.metric("dynrt_plans_total", kind="remote") == len(references)
    return answers


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(default_model_dir / "tokenizer.json"))


def prompts_of(references: References) -> dict[str, list[int]]:
    return {name: reference.prompt_ids for name, reference in references.items()}


async def test_aggregated_is_what_transformers_answers(references: References) -> None:
    assert len(references) >= 12
    for name, reference in references.items():
        assert len(reference.output_ids) == 64
        assert_judged_right(name, reference)


async def test_disaggregated_is_aggregated(disaggregated: dict[str, Answer], references: References) -> None:
    assert_all_same(references, disaggregated)


async def test_with_prefix_hits_on_both_workers(
    pair: ServedRuntime, disaggregated: dict[str, Answer], references: References
) -> None:
    prompts = prompts_of(references)
    pushed_before = pair.metric("dynrt_kv_bytes_pushed_total")
    answers = await pair.answers(prompts)
    await pair.settle()
    assert_all_same(references, answers)
    for name, prompt_ids in prompts.items():
        hit = (len(prompt_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE  # the last token is always computed
        assert answers[name].cached_tokens == hit, name
    begun_blocks = sum(len(prompt_ids) % BLOCK_SIZE > 0 for prompt_ids in prompts.values())
    assert pair.metric("dynrt_kv_bytes_pushed_total") - pushed_before == begun_blocks * BLOCK_BYTES


async def test_in_chunks_that_split_every_prompt(references: References) -> None:
    prompts = {name: ids for name, ids in prompts_of(references).items() if len(ids) < 400}
    config = RuntimeConfig(dtype="float32", local_prefill="never", max_batch_tokens=19)
    async with serve(config) as chunked:
        answers = await chunked.answers(prompts)
        assert chunked.metric("dynrt_handoffs_total", outcome="committed") == len(prompts)
    assert len(answers) >= 8 and min(map(len, prompts.values())) > 19
    assert_all_same(references, answers)


async def test_text_is_that_of_the_tokens(disaggregated: dict[str, Answer], tokenizer: Tokenizer) -> None:
    for name, answer in disaggregated.items():
        assert answer.text == tokenizer.decode(answer.token_ids), name


async def test_stop_string_across_the_first_token_and_the_second(
    pair: ServedRuntime, tokenizer: Tokenizer
) -> None:
    """Prefill makes the text of the first, decode that of the second."""
    prompt_ids = tokenizer.encode("The capital of France is").ids
    first, second = (
        tokenizer.decode([token_id]) for token_id in (await pair.answer(prompt_ids)).token_ids[:2]
    )
    stop = first[-1] + second[0]
    assert len(first) > 1
    for include, shown in ((False, ""), (True, stop)):
        answer = await pair.answer(prompt_ids, stop=(stop,), include_stop_str_in_output=include)
        assert (answer.text, answer.finish_reason, answer.stop_reason) == (first[:-1] + shown, "stop", stop)
        assert len(answer.token_ids) == 2


async def test_over_http_streamed_and_whole(
    pair: ServedRuntime, disaggregated: dict[str, Answer], references: References
) -> None:
    server = HttpServer(pair.runtime)
    await server.start(port=0)
    names = ("raw of 33", "raw of 640", "chat of several turns")
    async with aiohttp.ClientSession(server.url) as client:
        bodies = [{"prompt": references[name].prompt_ids, **GREEDY} for name in names]
        whole = await asyncio.gather(*(whole_text(client, body) for body in bodies))
        streamed = await asyncio.gather(*(streamed_text(client, body) for body in bodies))
    await server.stop(drain_s=0)
    assert whole == streamed == [disaggregated[name].text for name in names]


async def whole_text(client: aiohttp.ClientSession, body: dict[str, object]) -> str:
    async with client.post("/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["choices"][0]["text"])


async def streamed_text(client: aiohttp.ClientSession, body: dict[str, object]) -> str:
    async with client.post("/v1/completions", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        events = [line.removeprefix(b"data: ").strip() async for line in response.content if line.strip()]
    assert events[-1] == b"[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
