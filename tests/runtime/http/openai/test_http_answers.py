"""What a valid request gets, whole and streamed, and what of it reaches the backend."""

from __future__ import annotations

import aiohttp
import pytest
from scripted_backend import CONTEXT, MODEL, ScriptedBackend, chat, events_of, scored, text

from dynrt.runtime.errors import EngineError, NoWorkerError
from dynrt.runtime.messages import SamplingParams, unpack_ids
from dynrt.runtime.requests import GenerateOutput, ModelCard

USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 4,
    "total_tokens": 6,
    "prompt_tokens_details": {"cached_tokens": 2},
}


async def post(client: aiohttp.ClientSession, path: str, body: object) -> dict:
    async with client.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def stream(client: aiohttp.ClientSession, path: str, body: dict) -> list:
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        return events_of(await response.read())


async def test_chat_whole(client: aiohttp.ClientSession) -> None:
    body = await post(client, "/v1/chat/completions", chat())
    assert body["object"] == "chat.completion" and body["model"] == MODEL
    assert body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "stop"
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "Hello"
    assert body["usage"] == USAGE


async def test_completion_whole(client: aiohttp.ClientSession) -> None:
    body = await post(client, "/v1/completions", text())
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("Hello", "stop", None)
    assert body["usage"] == USAGE


@pytest.mark.parametrize(
    ("fields", "used"),
    [
        ({"truncate_prompt_tokens": 3}, "efg"),
        ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, "abc"),
        ({"truncate_prompt_tokens": 9}, "abcdefg"),
        ({"truncate_prompt_tokens": -1, "max_tokens": CONTEXT - 2}, "fg"),
        ({"truncation_side": "right"}, "abcdefg"),
    ],
)
async def test_a_prompt_is_cut(
    client: aiohttp.ClientSession, backend: ScriptedBackend, fields: dict, used: str
) -> None:
    """It counts, and is echoed, as it is used."""
    whole = await post(client, "/v1/completions", text("abcdefg", echo=True, **fields))
    assert whole["choices"][0]["text"] == f"{used}Hello" and whole["usage"]["prompt_tokens"] == len(used)
    whole = await post(client, "/v1/chat/completions", chat("abcdefg", **fields))
    assert whole["usage"]["prompt_tokens"] == len(used)
    for request in backend.requests:
        assert "".join(map(chr, unpack_ids(request.prompt_ids))) == used


async def test_a_prompt_that_is_cut_to_what_fits(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    await post(client, "/v1/chat/completions", chat("a" * 100, truncate_prompt_tokens=-1))
    await post(client, "/v1/completions", text("a" * 100, truncate_prompt_tokens=-1))
    rooms = [CONTEXT - len(request.prompt_ids) // 4 for request in backend.requests]
    assert rooms == [request.sampling.max_tokens for request in backend.requests] == [1, 16]


async def test_chat_streamed(client: aiohttp.ClientSession) -> None:
    *chunks, done = await stream(client, "/v1/chat/completions", chat())
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks), "usage was not asked for"


async def test_completion_streamed(client: aiohttp.ClientSession) -> None:
    *chunks, done = await stream(client, "/v1/completions", text())
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", chat()), ("/v1/completions", text())])
async def test_usage_of_a_stream(client: aiohttp.ClientSession, path: str, body: dict) -> None:
    options = {"stream_options": {"include_usage": True}}
    *chunks, last, done = await stream(client, path, body | options)
    assert done == "[DONE]"
    assert last["choices"] == [] and last["usage"] == USAGE
    assert not any("usage" in chunk for chunk in chunks)


async def test_usage_in_each_chunk(client: aiohttp.ClientSession) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    *chunks, _done = await stream(client, "/v1/completions", text(**options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 3, 4, 4]


async def test_a_first_output_without_text_still_opens_the_stream(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    backend.script = [GenerateOutput([1], ""), GenerateOutput([2], ""), GenerateOutput([3], "é", "length")]
    first, second, finish, _done = await stream(client, "/v1/chat/completions", chat())
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert second["choices"][0]["delta"] == {"content": "é"}
    assert finish["choices"][0]["finish_reason"] == "length"


async def test_an_answer_may_be_empty(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    backend.script = [GenerateOutput([1], "", "stop", stop_reason=1)]
    body = await post(client, "/v1/chat/completions", chat())
    assert body["choices"][0]["message"]["content"] == "" and body["choices"][0]["stop_reason"] == 1
    assert body["usage"]["completion_tokens"] == 1


async def test_parameters_reach_the_backend(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    asked = chat(
        max_tokens=9, max_completion_tokens=5, temperature=0, top_p=0.5, top_k=-1, seed=-3, stop=["a", "b"],
        stop_token_ids=[7], include_stop_str_in_output=True, min_tokens=2, ignore_eos=True, cache_salt="s",
        dynrt={"local_prefill": "never"}, user="u", presence_penalty=0.5, frequency_penalty=-1, repetition_penalty=1.2,
        min_p=0.1, logit_bias={"5": -100, "6": 1.5}, logprobs=True, top_logprobs=3, prompt_logprobs=2, priority=4,
        some_field_of_another_server={"x": 1},
    )  # fmt: skip
    backend.script = [scored([1], "a", "stop", prompt=[0, 0])]
    await post(client, "/v1/chat/completions", asked)
    [request] = backend.requests
    assert request.priority == 4
    assert request.sampling == SamplingParams(
        max_tokens=5, temperature=0.0, top_p=0.5, top_k=0, seed=-3, min_tokens=2, ignore_eos=True, stop=("a", "b"),
        stop_token_ids=(7,), include_stop_str_in_output=True, presence_penalty=0.5, frequency_penalty=-1.0,
        repetition_penalty=1.2, min_p=0.1, logit_bias=((5, -100.0), (6, 1.5)), logprobs=3, prompt_logprobs=2,
    )  # fmt: skip
    assert (request.model, request.seeded, request.salt, request.local_prefill) == (MODEL, True, "s", "never")
    assert unpack_ids(request.prompt_ids) == [ord("h"), ord("i")]


async def test_defaults(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    await post(client, "/v1/chat/completions", chat(stop=None, seed=None, n=1, tools=None, logprobs=False))
    await post(client, "/v1/completions", text(max_tokens=None, best_of=1, echo=False, suffix=None))
    rest_of_context, sixteen = backend.requests
    assert rest_of_context.sampling == SamplingParams(max_tokens=CONTEXT - 2)
    assert sixteen.sampling == SamplingParams(max_tokens=16)
    assert not sixteen.seeded and sixteen.salt == "" and sixteen.local_prefill is None


async def test_the_default_of_a_completion_shrinks_to_the_context(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    await post(client, "/v1/completions", text("x" * (CONTEXT - 3)))
    assert backend.requests[0].sampling.max_tokens == 3


async def test_top_p_0_is_the_top_token_only(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    await post(client, "/v1/completions", text(top_p=0, top_k=5))
    assert backend.requests[0].sampling.top_k == 1


@pytest.mark.parametrize("prompt", [[5, 6], [[5, 6]]])
async def test_a_prompt_of_token_ids(
    client: aiohttp.ClientSession, backend: ScriptedBackend, prompt: list
) -> None:
    await post(client, "/v1/completions", text(prompt))
    assert unpack_ids(backend.requests[0].prompt_ids) == [5, 6]


async def test_a_prompt_in_a_list(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    await post(client, "/v1/completions", text(["A"]))
    assert unpack_ids(backend.requests[0].prompt_ids) == [65]


async def test_messages_and_template_arguments_reach_the_template(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "name": "Ann", "content": parts},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "4"},
        {"role": "assistant", "content": "It"},
    ]
    asked = {"messages": messages, "reasoning_effort": "low", "chat_template_kwargs": {"think": False}}
    await post(client, "/v1/chat/completions", {**asked, "add_generation_prompt": False})
    await post(client, "/v1/chat/completions", {**asked, "continue_final_message": True})
    variables = {"think": False, "reasoning_effort": "low"}
    begun = {"add_generation_prompt": False, "continue_final_message": False}
    goes_on = {"add_generation_prompt": False, "continue_final_message": True}
    assert backend.chats == [(messages, begun, variables), (messages, goes_on, variables)]


async def test_a_stream_that_fails_before_its_first_output_has_the_errors_status(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    backend.script = [NoWorkerError("no decode worker is up", retry_after_s=3)]
    async with client.post("/v1/chat/completions", json=chat(stream=True)) as response:
        assert response.status == 503 and response.headers["Retry-After"] == "3"
        assert (await response.json())["error"]["message"] == "no decode worker is up"


async def test_a_stream_that_fails_later_ends_with_an_error_event(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    backend.script = [GenerateOutput([1], "a"), EngineError("out of memory")]
    first, error, done = await stream(client, "/v1/chat/completions", chat())
    assert first["choices"][0]["delta"]["content"] == "a"
    assert error == {
        "error": {"message": "out of memory", "type": "server_error", "param": None, "code": None}
    }
    assert done == "[DONE]"


async def test_a_bug_in_mid_stream_is_not_told(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    backend.script = [GenerateOutput([1], "a"), KeyError("secret")]
    _first, error, done = await stream(client, "/v1/completions", text())
    assert "internal error" in error["error"]["message"] and "secret" not in error["error"]["message"]
    assert done == "[DONE]"


@pytest.mark.parametrize("reason", ["cancelled", "error", None])
async def test_words_that_are_not_openais_never_show(
    client: aiohttp.ClientSession, backend: ScriptedBackend, reason: str | None
) -> None:
    backend.script = [GenerateOutput([1], "a"), GenerateOutput([2], "b", reason)]
    events = await stream(client, "/v1/chat/completions", chat())
    assert "error" in events[-2] and events[-1] == "[DONE]"
    async with client.post("/v1/completions", json=text()) as response:
        assert response.status == 500 and (await response.json())["error"]["type"] == "server_error"


async def test_models(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    card = {"id": MODEL, "object": "model", "created": 7, "owned_by": "dynrt", "max_model_len": CONTEXT}
    async with client.get("/v1/models") as response:
        assert await response.json() == {"object": "list", "data": [card]}
    async with client.get(f"/v1/models/{MODEL}") as response:
        assert await response.json() == card


async def test_without_a_model_the_only_one_answers(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    assert (await post(client, "/v1/completions", {"prompt": "x"}))["model"] == MODEL
    backend.cards.append(ModelCard("other", created=1, context_length=9, vocab_size=9))
    async with client.post("/v1/completions", json={"prompt": "x"}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "model"
