"""The tokenizer's routes, and routes that are named but not built."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from scripted_backend import CONTEXT, END, MODEL, VOCAB, ScriptedBackend, chat

HELLO = [ord(char) for char in "Hello"]


async def post(client: aiohttp.ClientSession, path: str, body: Any) -> tuple[int, Any]:
    async with client.post(path, json=body) as response:
        return response.status, await response.json()


async def test_text_to_tokens_and_back(client: aiohttp.ClientSession) -> None:
    status, answer = await post(client, "/tokenize", {"model": MODEL, "prompt": "Hello"})
    assert (status, answer) == (
        200,
        {"count": 5, "max_model_len": CONTEXT, "tokens": HELLO, "token_strs": None},
    )
    assert await post(client, "/detokenize", {"tokens": HELLO}) == (200, {"prompt": "Hello"})


async def test_tokens_by_name(client: aiohttp.ClientSession) -> None:
    _, answer = await post(client, "/tokenize", {"prompt": "ab", "return_token_strs": True})
    assert answer["token_strs"] == ["a", "b"]


async def test_no_text_has_no_tokens(client: aiohttp.ClientSession) -> None:
    _, answer = await post(client, "/tokenize", {"prompt": "", "add_special_tokens": False})
    assert (answer["count"], answer["tokens"]) == (0, [])
    assert await post(client, "/detokenize", {"tokens": []}) == (200, {"prompt": ""})


async def test_a_chat_is_put_into_the_template(
    client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    body = chat("hi", add_generation_prompt=False, chat_template_kwargs={"thinking": True})
    status, answer = await post(client, "/tokenize", body)
    assert (status, answer["count"]) == (200, 2)
    [(messages, ends, kwargs)] = backend.chats
    assert (messages, kwargs) == (body["messages"], {"thinking": True})
    assert ends == {"add_generation_prompt": False, "continue_final_message": False}


async def test_special_tokens_are_shown(client: aiohttp.ClientSession) -> None:
    status, _ = await post(client, "/detokenize", {"tokens": [END]})
    assert status == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "a", "add_special_tokens": "no"}, 400, "add_special_tokens"),
        ("/tokenize", {"prompt": "a", "model": "gpt"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, 400, "tokens"),
        ("/detokenize", {"tokens": [], "model": "gpt"}, 404, "model"),
    ],
)
async def test_what_is_refused(
    client: aiohttp.ClientSession, path: str, body: Any, status: int, param: str
) -> None:
    got, answer = await post(client, path, body)
    assert (got, answer["error"]["param"]) == (status, param)


async def test_what_lm_eval_asks_first(client: aiohttp.ClientSession) -> None:
    async with client.get("/tokenizer_info") as response:
        info = await response.json()
    assert (response.status, info["eos_token"], info["bos_token"]) == (200, "<|end|>", None)
    assert info["chat_template"] and info["vocab_size"] == VOCAB


async def test_embeddings_are_not_built(client: aiohttp.ClientSession) -> None:
    status, answer = await post(client, "/v1/embeddings", {"model": MODEL, "input": "x"})
    assert status == 501 and answer["error"]["type"] == "not_implemented_error"
    assert "embeddings are not built" in answer["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_health(client: aiohttp.ClientSession, backend: ScriptedBackend, method: str) -> None:
    async with client.request(method, "/ping") as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})
    backend.why_not_ready = "no decode worker is up"
    async with client.request(method, "/ping") as response:
        assert response.status == 503


async def test_load_counts_open_requests(client: aiohttp.ClientSession) -> None:
    async with client.get("/load") as response:
        assert await response.json() == {"server_load": 0}
