"""API keys: who is let in where, what the others are told, and keys that change while the server runs."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import aiohttp
import pytest
from scripted_backend import DEADLINE_S, RawConnection, chat

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.http.options import EndpointOptions
from dynrt.runtime.http.transport import server as server_module
from dynrt.runtime.http.transport.keys import read_keys
from dynrt.runtime.http.transport.server import HttpServer

CHAT = "/v1/chat/completions"
TWO_KEYS = EndpointOptions(api_keys=("one", "schlüssel"))


async def status_of(server: HttpServer, path: str = "/v1/models", **headers: str) -> int:
    async with aiohttp.ClientSession(server.url) as client, client.get(path, headers=headers) as response:
        return response.status


@pytest.mark.parametrize("key", TWO_KEYS.api_keys)
async def test_any_of_the_keys_opens(serve, key: str) -> None:
    server = await serve(TWO_KEYS)
    for headers in (
        {"Authorization": f"Bearer {key}"},
        {"Authorization": f"bearer  {key}"},
        {"x-api-key": key},
    ):
        assert await status_of(server, **headers) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "one"},
        {"Authorization": "Basic one"},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer onee"},
        {"Authorization": "Bearer one, schlüssel"},
        {"x-api-key": "on"},
        {"x-api-key": ""},
    ],
)
async def test_anything_else_is_a_401_in_the_envelope(serve, headers: dict[str, str]) -> None:
    server = await serve(TWO_KEYS)
    async with (
        aiohttp.ClientSession(server.url) as client,
        client.post(CHAT, json=chat(), headers=headers) as response,
    ):
        error = (await response.json())["error"]
    assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "API key" in error["message"]


async def test_anthropic_routes_have_anthropic_errors(serve) -> None:
    server = await serve(TWO_KEYS)
    async with aiohttp.ClientSession(server.url) as client:
        answers = [await client.post(path, headers={"X-Request-Id": "r"}) for path in ("/v1/messages", CHAT)]
        anthropic, openai = [await answer.json() for answer in answers]
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "authentication_error")
    assert anthropic["request_id"] == "r"
    assert openai["error"]["param"] is None


async def test_what_load_balancers_ask_is_open(serve) -> None:
    guarded = await serve(TWO_KEYS)
    opened = await serve(EndpointOptions(api_keys=("one",), guard_metrics=False))
    for path in ("/live", "/ready", "/health", "/ping"):
        assert await status_of(guarded, path) == 200
    for path in ("/version", "/load", "/metrics", "/nowhere", "/health/"):
        assert await status_of(guarded, path) == 401
    assert (await status_of(opened, "/metrics"), await status_of(opened, "/version")) == (200, 401)


async def test_a_body_is_not_asked_for_without_a_key(serve) -> None:
    server = await serve(TWO_KEYS)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    connection = RawConnection(
        *await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    )
    connection.send(head.encode())
    status, _headers, body = await connection.response()
    assert status == 401 and json.loads(body)["error"]["code"] == "invalid_api_key"
    connection.abort()


async def test_a_connection_is_good_after_a_401_with_an_unread_body(serve) -> None:
    server = await serve(TWO_KEYS)
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(server.url, connector=connector) as client:
        for body in (b"x" * 300_000, _chunks()):
            async with client.post(CHAT, data=body) as response:
                assert response.status == 401
            assert (await client.get("/v1/models", headers={"x-api-key": "one"})).status == 200


async def _chunks():
    yield b"x" * 1000
    yield b"y" * 1000


async def test_a_file_that_changes_is_read_again(
    serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "WATCH_S", 0.01)
    file = tmp_path / "keys"
    file.write_text("# of the team\n\nold\n")
    server = await serve(EndpointOptions(api_key_file=str(file)))
    assert await status_of(server, **{"x-api-key": "old"}) == 200
    (tmp_path / "new").write_text("new\n")
    os.replace(tmp_path / "new", file)
    async with asyncio.timeout(DEADLINE_S):
        while await status_of(server, **{"x-api-key": "new"}) != 200:
            pass
    assert await status_of(server, **{"x-api-key": "old"}) == 401


async def test_a_file_without_keys_changes_nothing(serve, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    server = await serve(EndpointOptions(api_key_file=str(file), api_keys=("beside",)))
    file.write_text("\n")
    server.reload()
    for key in ("old", "beside"):
        assert await status_of(server, **{"x-api-key": key}) == 200


@pytest.mark.parametrize("content", [None, b"", b"# nothing but this\n", b"\xff\xfe"])
def test_a_file_that_has_no_key_is_told_at_the_start(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/keys"):
        read_keys(tmp_path / "keys")
