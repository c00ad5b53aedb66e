"""CORS: pages that are allowed can call and read, errors and streams too; no other page can."""

from __future__ import annotations

import aiohttp
import pytest
from scripted_backend import chat

from dynrt.runtime.http.options import EndpointOptions

CHAT = "/v1/chat/completions"
PAGE, OTHER = "https://chat.example", "https://evil.example"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
}


async def headers_of(serve, options: EndpointOptions, method: str, path: str, **kwargs) -> tuple[int, dict]:
    server = await serve(options)
    async with (
        aiohttp.ClientSession(server.url) as client,
        client.request(method, path, **kwargs) as response,
    ):
        await response.read()
        return response.status, dict(response.headers)


@pytest.mark.parametrize("origins", [(PAGE, "http://localhost:3000"), ("*",)])
async def test_preflight_needs_no_key(serve, origins: tuple[str, ...]) -> None:
    options = EndpointOptions(api_keys=("k",), cors_origins=origins)
    status, headers = await headers_of(serve, options, "OPTIONS", CHAT, headers={"Origin": PAGE, **PREFLIGHT})
    assert status == 204
    assert headers["Access-Control-Allow-Origin"] == ("*" if origins == ("*",) else PAGE)
    assert headers["Access-Control-Allow-Headers"] == PREFLIGHT["Access-Control-Request-Headers"]
    assert "POST" in headers["Access-Control-Allow-Methods"]
    assert "Access-Control-Allow-Credentials" not in headers


@pytest.mark.parametrize(
    ("body", "status"), [(chat(), 200), (chat(stream=True), 200), (chat(n="x"), 400), (chat(model="?"), 404)]
)
async def test_every_answer_can_be_read_by_the_page(serve, body: dict, status: int) -> None:
    options = EndpointOptions(cors_origins=(PAGE,))
    got, headers = await headers_of(serve, options, "POST", CHAT, json=body, headers={"Origin": PAGE})
    assert (got, headers["Access-Control-Allow-Origin"], headers["Vary"]) == (status, PAGE, "Origin")
    assert "X-Request-Id" in headers["Access-Control-Expose-Headers"]


async def test_a_401_can_be_read_by_the_page(serve) -> None:
    options = EndpointOptions(api_keys=("k",), cors_origins=(PAGE,))
    status, headers = await headers_of(serve, options, "GET", "/v1/models", headers={"Origin": PAGE})
    assert (status, headers["Access-Control-Allow-Origin"]) == (401, PAGE)


@pytest.mark.parametrize("origins", [(), (PAGE,)])
async def test_other_pages_are_not_allowed(serve, origins: tuple[str, ...]) -> None:
    options = EndpointOptions(cors_origins=origins)
    for method, status in (("OPTIONS", 405), ("POST", 200)):
        got, headers = await headers_of(
            serve, options, method, CHAT, json=chat(), headers={"Origin": OTHER, **PREFLIGHT}
        )
        assert got == status and "Access-Control-Allow-Origin" not in headers
