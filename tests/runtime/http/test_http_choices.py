"""Several choices and several prompts in one request: generated together, told apart, ended together."""

from __future__ import annotations

import asyncio

import aiohttp
import msgspec
import pytest
from scripted_backend import DEADLINE_S, ScriptedBackend, chat, events_of, http_request, text

from dynrt.runtime.errors import EngineError, OverloadedError
from dynrt.runtime.http.choices import SHARED_PROMPT_TOKENS, outputs_of, requests_for_choices
from dynrt.runtime.messages import SamplingParams, TokenLogprob, pack_ids, unpack_ids
from dynrt.runtime.requests import GenerateOutput, GenerateRequest, ModelCard

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SCORES = [None, TokenLogprob(1, -0.5)]  # of a prompt


def request_of(seed: int = 0, prompt_tokens: int = 2) -> GenerateRequest:
    return GenerateRequest(
        pack_ids(range(prompt_tokens)), SamplingParams(max_tokens=4, seed=seed), seeded=True
    )


async def answer(client: aiohttp.ClientSession, path: str, body: dict) -> dict:
    async with client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def chunks(client: aiohttp.ClientSession, path: str, body: dict) -> list[dict]:
    async with client.post(path, json={**body, "stream": True}) as response:
        *events, done = events_of(await response.read())
    assert done == "[DONE]"
    return events


def test_seeds_are_derived_and_stay_64_bit() -> None:
    seeds = [request.sampling.seed for request in requests_for_choices(request_of(2**63 - 2), 4)]
    assert seeds == [2**63 - 2, 2**63 - 1, -(2**63), -(2**63) + 1]


async def test_choices_of_a_chat(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    body = await answer(client, CHAT, chat(n=3, seed=7))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in body["choices"]} == {"Hello"}
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}
    assert [request.sampling.seed for request in backend.requests] == [7, 8, 9]
    assert len({request.request_id for request in backend.requests}) == 3
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 12, 14)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}


async def test_choices_without_a_seed_are_drawn_each(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    await answer(client, CHAT, chat(n=2, temperature=0))
    assert [request.seeded for request in backend.requests] == [False, False]


async def test_a_stream_has_role_and_finish_of_each_choice(client: aiohttp.ClientSession) -> None:
    options = {"stream_options": {"include_usage": True}}
    *events, last = await chunks(client, CHAT, chat(n=3, **options))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 12
    for index in range(3):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant" and "role" not in mine[1]["delta"]
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "Hello"
        assert [choice["finish_reason"] for choice in mine] == [None, None, "stop"]


@pytest.mark.parametrize(
    "prompts", [["A", "BC"], [[65], [66, 67]], ["A", [66, 67]]], ids=["text", "ids", "both"]
)
async def test_several_prompts(
    client: aiohttp.ClientSession, backend: ScriptedBackend, prompts: list
) -> None:
    body = await answer(client, TEXT, text(prompts, n=2, seed=5))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    asked = [(unpack_ids(request.prompt_ids), request.sampling.seed) for request in backend.requests]
    assert asked == [([65], 5), ([65], 6), ([66, 67], 5), ([66, 67], 6)]
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 16), "a prompt counts once"
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}


async def test_a_choice_that_fails_ends_the_others(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    backend.script = [GenerateOutput([1], "a"), EngineError("out of memory")]
    async with client.post(TEXT, json=text(n=4)) as response:
        assert response.status == 500 and "out of memory" in await response.text()
    assert {await backend.closings.get() for _ in range(4)} == {one.request_id for one in backend.requests}


async def test_no_room_for_all_choices_refuses_the_request(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    backend.script = [OverloadedError("2 requests are open, the limit")]
    async with client.post(CHAT, json=chat(n=4, stream=True)) as response:
        assert response.status == 503 and "Retry-After" in response.headers


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_all_choices(connect, backend: ScriptedBackend, stream: bool) -> None:
    backend.script = [GenerateOutput([1], "a"), asyncio.Event()]
    connection = await connect()
    connection.send(http_request(CHAT, chat(n=3, stream=stream)))
    async with asyncio.timeout(DEADLINE_S):
        if stream:
            await connection.until(b"\n\n")
        await backend.entered.wait()
        connection.abort()
        assert len({await backend.closings.get() for _ in range(3)}) == 3


class HeldBackend:
    """Each choice's outputs come when its event is set."""

    def __init__(self, choices: int) -> None:
        self.may_go = [asyncio.Event() for _ in range(choices)]
        self.started: asyncio.Queue[int] = asyncio.Queue()

    async def generate(self, request: GenerateRequest, sink: object = None):
        number = request.sampling.seed
        self.started.put_nowait(number)
        await self.may_go[number].wait()
        yield GenerateOutput([number], "a")
        yield GenerateOutput([number], "b", "stop")


async def test_a_long_prompt_is_computed_by_its_first_choice_alone() -> None:
    backend = HeldBackend(3)
    requests = requests_for_choices(request_of(prompt_tokens=SHARED_PROMPT_TOKENS), 3)
    async with asyncio.timeout(DEADLINE_S), outputs_of(backend, requests, 3) as outputs:
        first = asyncio.ensure_future(anext(outputs))
        assert await backend.started.get() == 0 and backend.started.empty()
        for event in backend.may_go:
            event.set()
        seen = [await first, *[item async for item in outputs]]
    assert seen[0][0] == 0 and backend.started.qsize() == 2
    assert sorted(index for index, _ in seen) == [0, 0, 1, 1, 2, 2]


class ScoringBackend:
    """Scores prompts where it is asked to."""

    def __init__(self) -> None:
        self.asked: list[int | None] = []

    async def generate(self, request: GenerateRequest, sink: object = None):
        wanted = request.sampling.prompt_logprobs
        self.asked.append(wanted)
        yield GenerateOutput([1], "a", prompt_logprobs=None if wanted is None else SCORES)
        yield GenerateOutput([1], "b", "stop")


async def test_a_prompt_is_scored_by_its_first_choice_for_all() -> None:
    backend = ScoringBackend()
    one = request_of()
    sampling = msgspec.structs.replace(one.sampling, prompt_logprobs=1)
    requests = requests_for_choices(msgspec.structs.replace(one, sampling=sampling), 3)
    told: dict[int, list[object]] = {0: [], 1: [], 2: []}
    async with asyncio.timeout(DEADLINE_S), outputs_of(backend, requests, 3) as outputs:
        async for index, output in outputs:
            told[index].append(output.prompt_logprobs)
    assert backend.asked == [1, None, None]
    assert told == {index: [SCORES, None] for index in range(3)}


async def test_a_reader_that_waits_holds_the_choices_back() -> None:
    taken = 0

    class Endless:
        async def generate(self, request: GenerateRequest, sink: object = None):
            nonlocal taken
            while True:
                taken += 1
                yield GenerateOutput([1], "a")

    async with outputs_of(Endless(), requests_for_choices(request_of(), 2), 2) as outputs:
        await anext(outputs)
        before = -1
        while before != taken:
            before = taken
            await asyncio.sleep(0)
        assert taken <= 1 + 2 + 2, "one is read, two wait in the queue, one in the hand of each choice"


async def test_prompts_are_checked_before_any_is_run(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    backend.cards = [ModelCard("m", created=1, context_length=4, vocab_size=1000)]
    async with client.post(TEXT, json={"prompt": ["a", "abcdefgh"]}) as response:
        assert (
            response.status == 400 and (await response.json())["error"]["code"] == "context_length_exceeded"
        )
    assert not backend.requests
