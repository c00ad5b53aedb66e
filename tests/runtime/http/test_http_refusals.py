"""Every bad request gets a 4xx in the one envelope, which names value, limit and way out."""

from __future__ import annotations

import io
import json
import zlib
from typing import Any

import aiohttp
import pytest
from scripted_backend import CONTEXT, MODEL, VOCAB, ScriptedBackend, chat, text

from dynrt.runtime.http.transport.server import HttpServer

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


async def refused(response: aiohttp.ClientResponse, status: int) -> dict[str, Any]:
    """The error of a refusal, after a look at its envelope."""
    assert response.status == status, await response.text()
    assert response.content_type == "application/json"
    assert response.headers["X-Request-Id"]
    body = await response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and body["error"]["type"]
    return body["error"]


BAD_VALUES = [
    (TEXT, text(""), "prompt", "not empty"),
    (TEXT, text([]), "prompt", "not empty"),
    (TEXT, text([[]]), "prompt", "not empty"),
    (TEXT, text(None), "prompt", "must be a string"),
    (TEXT, text(5), "prompt", "must be a string"),
    (TEXT, text(["a", ""]), "prompt[1]", "not empty"),
    (TEXT, text(["a", 5]), "prompt[1]", "must be a string"),
    (TEXT, text(["a"] * 129), "prompt", "at most 128 prompts"),
    (TEXT, text(["a"] * 3, n=43), "n", "at most 42 with 3 prompts"),
    (TEXT, text([1, -1]), "prompt", "no id negative"),
    (TEXT, text([1, True]), "prompt", "list of token ids"),
    (TEXT, text([1, 2**32]), "prompt", "list of token ids"),
    (TEXT, text([1, VOCAB]), "prompt", f"from 0 to {VOCAB - 1}"),
    (CHAT, {"model": "whatever"}, "messages", "at least one message"),
    (CHAT, {"messages": []}, "messages", "at least one message"),
    (CHAT, {"messages": 5}, "messages", "at least one message"),
    (CHAT, {"messages": [{}] * 10_001}, "messages", "at most 10000"),
    (CHAT, {"messages": ["hi"]}, "messages[0]", "must be an object"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"tools": []}},
        "chat_template_kwargs.tools",
        "field of the request itself",
    ),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role", "system, developer, user, assistant"),
    (CHAT, {"messages": [{"role": "tool", "content": None}]}, "messages[0].content", "string or a list"),
    (
        CHAT,
        {"messages": [{"role": "tool", "content": "", "tool_call_id": 1}]},
        "messages[0].tool_call_id",
        "string",
    ),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "string or a list"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content", "string or a list"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "text",
    ),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls", "list"),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0]",
        "function",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}]},
        "messages[0].tool_calls[0].function.name",
        "name of a tool",
    ),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
        "messages[0].tool_calls[0].function.arguments",
        "JSON as a string",
    ),
    (CHAT, {"messages": [{"role": "assistant", "reasoning": 5}]}, "messages[0].reasoning", "string"),
    (CHAT, chat(max_tokens=0), "max_tokens", "max_tokens is 0; it must be an integer, at least 1"),
    (CHAT, chat(max_tokens=-1), "max_tokens", "at least 1"),
    (CHAT, chat(max_tokens=True), "max_tokens", "integer"),
    (CHAT, chat(max_tokens=1e3), "max_tokens", "integer"),
    (CHAT, chat(max_completion_tokens="5"), "max_completion_tokens", 'is "5"'),
    (CHAT, chat(temperature=-0.1), "temperature", "from 0 to 2"),
    (CHAT, chat(temperature=2.1), "temperature", "temperature is 2.1"),
    (CHAT, chat(temperature="hot"), "temperature", "number"),
    (CHAT, chat(top_p=1.1), "top_p", "from 0 to 1"),
    (CHAT, chat(top_p="0.5"), "top_p", "number"),
    (CHAT, chat(top_k=-2), "top_k", "from -1"),
    (CHAT, chat(top_k=1.5), "top_k", "integer"),
    (CHAT, chat(seed=2**63), "seed", "integer"),
    (CHAT, chat(seed="x"), "seed", "integer"),
    (CHAT, chat(stop=""), "stop", "empty"),
    (CHAT, chat(stop=["a", ""]), "stop", "empty"),
    (CHAT, chat(stop=["a"] * 17), "stop", "stop is a list of 17; it must be a string or a list of up to 16"),
    (CHAT, chat(stop=[1]), "stop", "strings"),
    (CHAT, chat(stop={}), "stop", "strings"),
    (CHAT, chat(stop_token_ids=[-1]), "stop_token_ids", "negative"),
    (CHAT, chat(stop_token_ids=5), "stop_token_ids", "list"),
    (CHAT, chat(stop_token_ids=[VOCAB]), "stop_token_ids", f"token id {VOCAB}"),
    (CHAT, chat(min_tokens=-1), "min_tokens", "from 0"),
    (CHAT, chat(min_tokens=6, max_tokens=5), "min_tokens", "limited to 5 tokens"),
    (CHAT, chat(ignore_eos=1), "ignore_eos", "true or false"),
    (CHAT, chat(stream="yes"), "stream", "true or false"),
    (CHAT, chat(stream_options={"include_usage": True}), "stream_options", "stream be true"),
    (CHAT, chat(stream=True, stream_options=5), "stream_options", "object"),
    (CHAT, chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage", "true or"),
    (CHAT, chat(n=129), "n", "from 1 to 128"),
    (CHAT, chat(n=0), "n", "from 1 to 128"),
    (CHAT, chat(best_of=2), "best_of", "at most n, which is 1"),
    (CHAT, chat(presence_penalty=2.1), "presence_penalty", "from -2 to 2"),
    (CHAT, chat(frequency_penalty=-2.1), "frequency_penalty", "from -2 to 2"),
    (CHAT, chat(repetition_penalty=0), "repetition_penalty", "from 0.01 to 2"),
    (CHAT, chat(min_p=1.5), "min_p", "from 0 to 1"),
    (CHAT, chat(logit_bias=[]), "logit_bias", "object"),
    (CHAT, chat(logit_bias={"a": 1}), "logit_bias.a", "token id"),
    (CHAT, chat(logit_bias={"-1": 1}), "logit_bias.-1", "token id"),
    (CHAT, chat(logit_bias={"5": 101}), "logit_bias.5", "from -100 to 100"),
    (CHAT, chat(logit_bias={"5": None}), "logit_bias.5", "from -100 to 100"),
    (CHAT, chat(logit_bias={str(VOCAB): 1}), "logit_bias", f"token id {VOCAB}"),
    (CHAT, chat(logit_bias={str(i): 1 for i in range(1025)}), "logit_bias", "at most 1024"),
    (CHAT, chat(logprobs=5), "logprobs", "true or false"),
    (CHAT, chat(top_logprobs=2), "top_logprobs", "logprobs be true"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "from 0 to 20"),
    (TEXT, text(logprobs="abc"), "logprobs", "from 0 to 20"),
    (TEXT, text(logprobs=True), "logprobs", "from 0 to 20"),
    (TEXT, text(logprobs=21), "logprobs", "from 0 to 20"),
    (TEXT, text(echo=1), "echo", "true or false"),
    (TEXT, text(max_tokens=0), "max_tokens", "at least 1"),
    (TEXT, text(prompt_logprobs=1, stream=True), "prompt_logprobs", "stream"),
    (CHAT, chat(priority="high"), "priority", "integer"),
    (CHAT, chat(return_token_ids=1), "return_token_ids", "true or false"),
    (CHAT, chat(reasoning_effort="huge"), "reasoning_effort", "one of none, minimal"),
    (CHAT, chat(reasoning_effort=[]), "reasoning_effort", "one of none, minimal"),
    (CHAT, chat(continue_final_message=True), "continue_final_message", "last message be the assistant's"),
    (
        CHAT,
        chat(continue_final_message=True, add_generation_prompt=True),
        "continue_final_message",
        "where add_generation_prompt is true",
    ),
    (CHAT, chat(response_format={}), "response_format.type", "json_object"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type", "json_object"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema", '"schema"'),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"name": "a"}}),
        "response_format.json_schema.schema",
        "JSON schema",
    ),
    (
        CHAT,
        chat(response_format={"type": "json_schema", "json_schema": {"schema": {}, "strict": "yes"}}),
        "response_format.json_schema.strict",
        "true or false",
    ),
    (CHAT, chat(structured_outputs={"regex": "a", "choice": ["a"]}), "structured_outputs", "one of"),
    (
        CHAT,
        chat(structured_outputs={"whitespace_pattern": "x"}),
        "structured_outputs.whitespace_pattern",
        "left out",
    ),
    (CHAT, chat(structured_outputs={"regex": 5}), "structured_outputs.regex", "regular expression"),
    (CHAT, chat(structured_outputs={"choice": []}), "structured_outputs.choice", "1 to 4096"),
    (CHAT, chat(structured_outputs={"choice": [""]}), "structured_outputs.choice", "none empty"),
    (CHAT, chat(structured_outputs={"json": "[]"}), "structured_outputs.json", "JSON schema"),
    (
        CHAT,
        chat(structured_outputs={"grammar": "x" * 300_000}),
        "structured_outputs.grammar",
        "at most 262144",
    ),
    (
        CHAT,
        chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"}),
        "structured_outputs",
        "left out",
    ),
    (CHAT, chat(model=5), "model", "string"),
    (CHAT, chat(cache_salt=""), "cache_salt", "1 to 128"),
    (CHAT, chat(dynrt={"local_prefill": "maybe"}), "dynrt.local_prefill", '"never"'),
    (CHAT, chat(dynrt={"local_prefil": "never"}), "dynrt.local_prefil", "local_prefill"),
    (CHAT, chat(chat_template_kwargs=5), "chat_template_kwargs", "object"),
    (CHAT, chat(truncate_prompt_tokens=0), "truncate_prompt_tokens", "at least 1"),
    (TEXT, text(truncate_prompt_tokens=-2), "truncate_prompt_tokens", "-1 for what fits"),
    (TEXT, text(truncate_prompt_tokens=5, truncation_side="top"), "truncation_side", '"right"'),
]


@pytest.mark.parametrize(("path", "body", "param", "clause"), BAD_VALUES)
async def test_bad_value(
    client: aiohttp.ClientSession, backend: ScriptedBackend, path: str, body: Any, param: str, clause: str
) -> None:
    async with client.post(path, json=body) as response:
        error = await refused(response, 400)
    assert error["param"] == param and clause in error["message"]
    assert error["type"] == "invalid_request_error"
    assert not backend.requests, "nothing that is refused at the door reaches the backend"


UNSUPPORTED = [
    (CHAT, {"echo": True}, "/v1/completions"), (CHAT, {"documents": [{}]}, "chat_template_kwargs"),
    (CHAT, {"kv_transfer_params": {"a": 1}}, "leave it out"), (CHAT, {"functions": [{}]}, "use tools"),
    (CHAT, {"function_call": "auto"}, "use tool_choice"), (CHAT, {"modalities": ["audio"]}, "leave it out"),
    (TEXT, {"suffix": "x"}, "prompt"), (TEXT, {"use_beam_search": True}, "set n"),
    (TEXT, {"length_penalty": 2}, "set n"), (TEXT, {"kv_transfer_params": {"a": 1}}, "leave it out"),
    (TEXT, {"guided_regex": "a"}, "use structured_outputs.regex"), (TEXT, {"bad_words": ["a"]}, "logit_bias"),
    (TEXT, {"guided_json": {}}, "use response_format"), (CHAT, {"guided_choice": ["a"]}, "structured_outputs.choice"),
    (CHAT, {"guided_grammar": "a"}, "use structured_outputs.grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "field", "way_out"), UNSUPPORTED)
async def test_what_is_not_built_is_refused_by_name(
    client: aiohttp.ClientSession, path: str, field: dict[str, Any], way_out: str
) -> None:
    [name] = field
    async with client.post(path, json=(chat() if path == CHAT else text()) | field) as response:
        error = await refused(response, 400)
    assert error["param"] == name and f"{name} is not supported; " in error["message"]
    assert way_out in error["message"].split("not supported; ")[1]


async def test_all_problems_at_once(client: aiohttp.ClientSession) -> None:
    async with client.post(
        CHAT, json={"messages": [], "temperature": 9, "top_k": "x", "tools": [1]}
    ) as response:
        error = await refused(response, 400)
    assert error["param"] == "messages"
    assert all(name in error["message"] for name in ("messages", "temperature is 9", "top_k", "tools"))


async def test_a_message_stays_short_however_much_is_wrong(client: aiohttp.ClientSession) -> None:
    async with client.post(CHAT, json={"messages": ["x"] * 5000, "model": "m" * 100_000}) as response:
        error = await refused(response, 400)
    assert len(error["message"]) < 2000


BAD_BODIES = [
    (b"", "empty"),
    (b"{", "not valid JSON"),
    (b"{} x", "not valid JSON"),
    (b"\xef\xbb\xbf{}", "byte order mark"),
    (b'{"prompt": "\xff"}', "UTF-8"),
    (b'{"prompt": "\\ud800"}', "not valid JSON"),
    (b"[]", "not an object"),
    (b"null", "not an object"),
    (b'"x"', "not an object"),
    (b'{"temperature": NaN}', "NaN"),
    (b'{"temperature": -Infinity}', "Infinity"),
    (b'{"temperature": 1e999}', "too large"),
    (b"[" * 100_000, "too deeply"),
    (b'{"a":' * 100_000, "too deeply"),
]


@pytest.mark.parametrize(("body", "clause"), BAD_BODIES)
async def test_bad_body(client: aiohttp.ClientSession, body: bytes, clause: str) -> None:
    for path in (CHAT, TEXT):
        async with client.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
            error = await refused(response, 400)
        assert clause in error["message"]
        assert response.connection is None or not response.connection.closed


async def test_a_body_without_content_type_is_taken_as_json(client: aiohttp.ClientSession) -> None:
    body, headers = json.dumps(text()).encode(), {"User-Agent": "x"}
    async with client.post(TEXT, data=body, headers=headers, skip_auto_headers=["Content-Type"]) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
async def test_another_media_type(client: aiohttp.ClientSession, media_type: str) -> None:
    async with client.post(CHAT, data=b"{}", headers={"Content-Type": media_type}) as response:
        error = await refused(response, 415)
    assert media_type in error["message"] and "application/json" in error["message"]


async def test_an_unknown_encoding(client: aiohttp.ClientSession) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": "compress"}
    async with client.post(CHAT, data=b"{}", headers=headers) as response:
        error = await refused(response, 415)
    assert "gzip" in error["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_body_that_is_not_encoded_as_it_says(client: aiohttp.ClientSession, encoding: str) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    async with client.post(CHAT, data=b"not compressed", headers=headers) as response:
        assert "Content-Encoding" in (await refused(response, 400))["message"]


async def test_a_body_of_2_mb_is_read_and_one_of_17_mib_is_not(client: aiohttp.ClientSession) -> None:
    headers = {"Content-Type": "application/json"}
    two_mb, seventeen_mib = (json.dumps(text("x" * size)).encode() for size in (2_000_000, 17 * 2**20))
    async with client.post(TEXT, data=io.BytesIO(two_mb), headers=headers) as response:
        assert (await refused(response, 400))["code"] == "context_length_exceeded"
    for chunked in (None, True):
        async with client.post(
            TEXT, data=io.BytesIO(seventeen_mib), headers=headers, chunked=chunked
        ) as response:
            assert "16777216" in (await refused(response, 413))["message"]


async def test_a_body_that_is_large_only_once_it_is_unpacked(client: aiohttp.ClientSession) -> None:
    packed = zlib.compress(json.dumps(text("x" * (20 * 2**20))).encode())
    headers = {"Content-Type": "application/json", "Content-Encoding": "deflate"}
    async with client.post(TEXT, data=packed, headers=headers) as response:
        await refused(response, 413)


async def test_the_prompt_is_too_long(client: aiohttp.ClientSession) -> None:
    async with client.post(TEXT, json=text("x" * CONTEXT)) as response:
        error = await refused(response, 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert f"{CONTEXT} tokens" in error["message"] and f"at most {CONTEXT - 1}" in error["message"]


@pytest.mark.parametrize("asked", [CONTEXT - 9, 2**31, 2**63])
async def test_max_tokens_is_too_large_for_the_prompt(client: aiohttp.ClientSession, asked: int) -> None:
    async with client.post(CHAT, json=chat("x" * 10, max_completion_tokens=asked, stream=True)) as response:
        error = await refused(response, 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_completion_tokens")
    assert "10 tokens" in error["message"] and f"at most {CONTEXT - 10}" in error["message"]


async def test_an_unknown_model(client: aiohttp.ClientSession) -> None:
    for response in (await client.post(CHAT, json=chat(model="gpt")), await client.get("/v1/models/gpt")):
        error = await refused(response, 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert '"gpt"' in error["message"] and MODEL in error["message"]


@pytest.mark.parametrize("path", ["/", "/v1", "//v1/models", "/health/", "/v1/nowhere", "/a%00b"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_an_unknown_route(
    client: aiohttp.ClientSession, server: HttpServer, method: str, path: str
) -> None:
    async with client.request(method, server.url + path) as response:
        assert "/v1/chat/completions" in (await refused(response, 404))["message"]


GET_PATHS = ["/v1/models", f"/v1/models/{MODEL}", "/health", "/live", "/ready", "/version", "/metrics"]


@pytest.mark.parametrize(
    ("path", "allowed"), [*((path, "GET,HEAD") for path in GET_PATHS), (CHAT, "POST"), (TEXT, "POST")]
)
@pytest.mark.parametrize("method", ["PUT", "OPTIONS", "PATCH", "DELETE"])
async def test_a_wrong_method(client: aiohttp.ClientSession, method: str, path: str, allowed: str) -> None:
    async with client.request(method, path) as response:
        error = await refused(response, 405)
    assert response.headers["Allow"] == allowed and method in error["message"]


async def test_while_loading(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    backend.cards, backend.why_not_ready = [], "no decode worker is up"
    for path in ("/health", "/ready", f"/v1/models/{MODEL}"):
        async with client.get(path) as response:
            error = await refused(response, 503)
        assert "no decode worker is up" in error["message"] and int(response.headers["Retry-After"]) >= 1
    async with client.post(CHAT, json=chat()) as response:
        await refused(response, 503)


async def test_while_the_runtime_drains(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    backend.is_draining = True
    for response in (await client.get("/ready"), await client.post(CHAT, json=chat())):
        assert "draining" in (await refused(response, 503))["message"]
        assert int(response.headers["Retry-After"]) >= 1
    async with client.get("/health") as response:
        assert response.status == 200


async def test_a_bug_is_not_told(client: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    backend.script = [KeyError("secret")]
    async with client.post(CHAT, json=chat(), headers={"X-Request-Id": "req-7"}) as response:
        error = await refused(response, 500)
    assert "req-7" in error["message"] and "secret" not in error["message"]
    assert error["type"] == "server_error"


async def test_probes_and_metrics(client: aiohttp.ClientSession) -> None:
    for path in ("/health", "/live", "/ready"):
        async with client.get(path) as response:
            assert response.status == 200 and await response.json() == {"status": "ok"}
    async with client.get("/version") as response:
        assert (await response.json())["version"]
    async with client.get("/metrics") as response:
        assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert await response.read() == b"dynrt_up 1\n"
