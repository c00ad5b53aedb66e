"""What is told of tokens beside the text: log probabilities in each endpoint's shape, token ids, the prompt's echo."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted_backend import (
    END,
    HALVES,
    CharacterTokens,
    ScriptedBackend,
    chat,
    events_of,
    scored,
    text,
)

from dynrt.runtime.http.openai.logprobs import TextCursor, text_logprobs, token_name
from dynrt.runtime.messages import SamplingParams, TokenLogprob, unpack_ids
from dynrt.runtime.requests import GenerateOutput

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


async def answer(client: aiohttp.ClientSession, path: str, body: dict) -> dict:
    async with client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def choices_of_stream(client: aiohttp.ClientSession, path: str, body: dict) -> list[dict]:
    async with client.post(path, json={**body, "stream": True}) as response:
        *events, done = events_of(await response.read())
    assert done == "[DONE]"
    return [event["choices"][0] for event in events]


def ids(letters: str) -> list[int]:
    return [ord(letter) for letter in letters]


def ab(backend: ScriptedBackend, prompt: str | None = None) -> None:
    """The answer "ab", in two outputs and behind them the end."""
    of_prompt = None if prompt is None else ids(prompt)
    backend.script = [
        scored(ids("a"), "a", prompt=of_prompt),
        scored(ids("b"), "b"),
        scored([END], "", "stop"),
    ]


# --- chat -----------------------------------------------------------------------------------------


def entry(letter: str, top: int) -> dict:
    alternatives = [("Z", -0.25), (letter, -0.5)][:top]
    return {
        "token": letter, "logprob": -0.5, "bytes": ids(letter),
        "top_logprobs": [{"token": one, "logprob": p, "bytes": ids(one)} for one, p in alternatives],
    }  # fmt: skip


@pytest.mark.parametrize("top", [0, 1, 2])
async def test_chat_logprobs_whole(client: aiohttp.ClientSession, backend: ScriptedBackend, top: int) -> None:
    ab(backend)
    body = await answer(client, CHAT, chat(logprobs=True, top_logprobs=top))
    assert backend.requests[0].sampling.logprobs == top
    *content, end = body["choices"][0]["logprobs"]["content"]
    assert content == [entry("a", top), entry("b", top)]
    assert (end["token"], end["bytes"]) == ("<|end|>", []), "a special token is no text"


async def test_chat_logprobs_streamed(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    ab(backend)
    first, second, last, finish = await choices_of_stream(client, CHAT, chat(logprobs=True))
    assert [part["logprobs"]["content"] for part in (first, second)] == [[entry("a", 0)], [entry("b", 0)]]
    assert last["delta"] == {"content": ""} and last["logprobs"]["content"][0]["token"] == "<|end|>"
    assert finish["finish_reason"] == "stop" and "logprobs" not in finish


async def test_bytes_of_a_character_cut_by_tokens_are_those_of_the_text(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    backend.script = [scored([HALVES[0]], ""), scored([HALVES[1]], "é", "length")]
    body = await answer(client, CHAT, chat(logprobs=True))
    first, second = body["choices"][0]["logprobs"]["content"]
    assert bytes(first["bytes"] + second["bytes"]).decode() == body["choices"][0]["message"]["content"]
    assert (first["token"], second["token"]) == ("bytes:\\xc3", "bytes:\\xa9")


async def test_without_logprobs_there_are_none(client: aiohttp.ClientSession) -> None:
    body = await answer(client, CHAT, chat(logprobs=False, top_logprobs=0))
    assert body["choices"][0]["logprobs"] is None
    assert not any("logprobs" in choice for choice in await choices_of_stream(client, CHAT, chat()))


async def test_an_engine_that_leaves_out_log_probabilities_fails(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    backend.script = [scored([65], "A"), GenerateOutput([66], "B", "stop")]
    async with client.post(TEXT, json=text(logprobs=1)) as response:
        assert response.status == 500 and "1 log probabilities for 2 tokens" in await response.text()


async def test_prompt_logprobs(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    ab(backend, prompt="hi")
    told = [None, {"105": {"logprob": -1.0, "rank": 1, "decoded_token": "i"}}]
    assert (await answer(client, CHAT, chat(prompt_logprobs=1)))["prompt_logprobs"] == told
    assert (await answer(client, TEXT, text(prompt_logprobs=1)))["choices"][0]["prompt_logprobs"] == told
    without = [None, {"105": {"logprob": -1.0, "rank": None, "decoded_token": "i"}}]
    assert (await answer(client, CHAT, chat(prompt_logprobs=0)))["prompt_logprobs"] == without


# --- text completions -----------------------------------------------------------------------------


async def test_text_logprobs_whole(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    ab(backend)
    body = await answer(client, TEXT, text(logprobs=1))
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b", "<|end|>"],
        "token_logprobs": [-0.5, -0.5, -0.5],
        "top_logprobs": [{"Z": -0.25, name: -0.5} for name in ("a", "b", "<|end|>")],
        "text_offset": [0, 1, 2],
    }


async def test_logprobs_0_tells_the_token_chosen(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    ab(backend)
    body = await answer(client, TEXT, text(logprobs=0))
    assert backend.requests[0].sampling.logprobs == 0
    assert body["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.5}


@pytest.mark.parametrize("prompt", ["hi", [104, 105]], ids=["text", "ids"])
@pytest.mark.parametrize("logprobs", [None, 0, 2])
async def test_an_echo_begins_with_the_prompt_whole_and_streamed(
    client: aiohttp.ClientSession, backend: ScriptedBackend, prompt: object, logprobs: int | None
) -> None:
    if logprobs is None:
        backend.script = [GenerateOutput([97], "a"), GenerateOutput([98], "b", "length")]
    else:
        backend.script = [scored([97], "a", prompt=[104, 105]), scored([98], "b", "length")]
    asked = text(prompt, echo=True, logprobs=logprobs)
    whole = (await answer(client, TEXT, asked))["choices"][0]
    parts = await choices_of_stream(client, TEXT, asked)
    assert whole["text"] == "".join(part["text"] for part in parts) == "hiab"
    assert backend.requests[0].sampling.prompt_logprobs == logprobs
    if logprobs is None:
        assert whole["logprobs"] is None
        return
    told = whole["logprobs"]
    assert told["tokens"] == ["h", "i", "a", "b"] and told["text_offset"] == [0, 1, 2, 3]
    assert told["token_logprobs"] == [None, -1.0, -0.5, -0.5] and told["top_logprobs"][0] is None
    for name, values in told.items():
        assert [value for part in parts for value in part["logprobs"][name]] == values


async def test_an_echo_of_several_prompts(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    body = await answer(client, TEXT, text(["A", [66, 67]], n=2, echo=True))
    assert [choice["text"] for choice in body["choices"]] == ["AHello", "AHello", "BCHello", "BCHello"]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_without_an_answer(
    client: aiohttp.ClientSession, backend: ScriptedBackend, stream: bool
) -> None:
    backend.script = [scored([97], "a", "stop", prompt=[104, 105])]
    asked = text(echo=True, max_tokens=0, logprobs=0)
    if stream:
        [choice] = await choices_of_stream(client, TEXT, asked)
    else:
        body = await answer(client, TEXT, asked)
        assert body["usage"]["completion_tokens"] == 0
        [choice] = body["choices"]
    assert backend.requests[0].sampling.max_tokens == 1, "engines make at least one"
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("hi", "length", None)
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0]


async def test_what_an_evaluation_of_likelihoods_reads(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    """One entry per token of the prompt and one of the answer; a greedy token's value is the maximum's, bit by bit."""
    top = [(105, math.log(1 / 3)), (106, math.log(1 / 7))]
    entries = [None, TokenLogprob(105, top[0][1], top)]
    backend.script = [
        GenerateOutput(
            [97], "a", "length", logprobs=[TokenLogprob(97, -0.5, [(97, -0.5)])], prompt_logprobs=entries
        )
    ]
    asked = text([104, 105], echo=True, max_tokens=1, logprobs=1, temperature=0)
    async with client.post(TEXT, json=asked) as response:
        told = json.loads(await response.text())["choices"][0]["logprobs"]
    assert len(told["token_logprobs"]) == len(told["top_logprobs"]) == 3
    assert told["token_logprobs"][1] == max(told["top_logprobs"][1].values()) == math.log(1 / 3)


def test_what_cannot_be_has_a_finite_log_probability() -> None:
    entries = [(65, TokenLogprob(65, -math.inf, [(66, -0.1), (67, -math.inf)]))]
    told = text_logprobs(CharacterTokens(), entries, 2, TextCursor(CharacterTokens()))
    assert told.token_logprobs == [-9999.0] and told.top_logprobs == [{"B": -0.1, "C": -9999.0, "A": -9999.0}]


def test_offsets_count_characters_of_the_text() -> None:
    cursor = TextCursor(CharacterTokens(), text="a<|end|>é")
    assert [cursor.advance(one) for one in (END, ord("a"), END, *HALVES, ord("b"))] == [0, 0, 1, 8, 8, 9]


class Pieces(CharacterTokens):
    """Token i is the i-th piece of a text that was cut anywhere."""

    def __init__(self, text: str, cuts: list[int]) -> None:
        encoded = text.encode()
        ends = sorted({0, len(encoded), *(cut % (len(encoded) + 1) for cut in cuts)})
        super().__init__(enumerate(encoded[begin:end] for begin, end in pairwise(ends)))


@given(st.text(min_size=1), st.lists(st.integers(0, 1000), max_size=20))
def test_offsets_are_where_the_text_of_whole_tokens_is(text: str, cuts: list[int]) -> None:
    pieces = Pieces(text, cuts)
    cursor = TextCursor(pieces)
    begins = [cursor.advance(token_id) for token_id in pieces]
    for begin, end, token_id in zip(begins, [*begins[1:], len(text)], pieces, strict=True):
        name = token_name(pieces, token_id)
        assert begin <= end and (name.startswith("bytes:") or text[begin:end] == name)


def test_offsets_behind_a_prompt_that_ends_inside_a_character() -> None:
    cursor = TextCursor(CharacterTokens(), before=[HALVES[0]])
    assert [cursor.advance(one) for one in (HALVES[1], ord("b"))] == [0, 1]


def test_the_first_space_that_a_text_drops_has_no_offset() -> None:
    class Words(CharacterTokens):
        drops_first_space = True

        def __missing__(self, token_id: int) -> bytes:
            return b" ab"

    assert [TextCursor(Words()).advance(1) for _ in range(2)] == [0, 0]
    at_start, behind_text = TextCursor(Words()), TextCursor(Words(), before=[1])
    assert [at_start.advance(1), at_start.advance(1)] == [0, 2]
    assert [behind_text.advance(1), behind_text.advance(1)] == [0, 3]


def test_names_of_tokens() -> None:
    names = [token_name(CharacterTokens(), one) for one in (65, END, HALVES[0])]
    assert names == ["A", "<|end|>", "bytes:\\xc3"]


# --- token ids ------------------------------------------------------------------------------------


async def test_token_ids_of_a_chat(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    asked = chat(return_token_ids=True, n=2)
    body = await answer(client, CHAT, asked)
    assert body["prompt_token_ids"] == ids("hi")
    assert [choice["token_ids"] for choice in body["choices"]] == [[1, 2, 3, 4], [1, 2, 3, 4]]
    async with client.post(CHAT, json={**asked, "stream": True}) as response:
        *events, _done = events_of(await response.read())
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [ids("hi")]
    for index in range(2):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [one for choice in mine for one in choice.get("token_ids", [])] == [1, 2, 3, 4]


async def test_token_ids_of_a_completion(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    backend.script = [GenerateOutput([1], ""), GenerateOutput([2], "é", "stop")]
    body = await answer(client, TEXT, text(return_token_ids=True))
    [choice] = body["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids("hi"), [1, 2])
    first, second = await choices_of_stream(client, TEXT, text(return_token_ids=True))
    assert (first["prompt_token_ids"], first["token_ids"], second["token_ids"]) == (ids("hi"), [1], [2])
    assert "prompt_token_ids" not in second


async def test_special_tokens_can_be_shown(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    await answer(client, TEXT, text(skip_special_tokens=False))
    assert backend.requests[0].sampling == SamplingParams(max_tokens=16, shown_special_tokens=("<|end|>",))
    assert unpack_ids(backend.requests[0].prompt_ids) == ids("hi")
