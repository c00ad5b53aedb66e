"""Start and stop: where the server listens, how it drains, what it says when it cannot."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from scripted_backend import DEADLINE_S, RawConnection, ScriptedBackend, chat, events_of, http_request

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.http.transport.server import HttpServer
from dynrt.runtime.requests import GenerateOutput


async def test_a_port_in_use(server: HttpServer, backend: ScriptedBackend) -> None:
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*in use.*--port"):
        await HttpServer(backend).start(port=port)


async def test_an_address_of_another_machine(backend: ScriptedBackend) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0.*--host"):
        await HttpServer(backend).start("192.0.2.1", 0)


async def test_stop_without_start(backend: ScriptedBackend) -> None:
    await HttpServer(backend).stop(drain_s=0)


async def test_ipv6(backend: ScriptedBackend) -> None:
    server = HttpServer(backend)
    try:
        await server.start("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6 loopback")
    async with aiohttp.ClientSession(server.url) as client, client.get("/live") as response:
        assert server.url.startswith("http://[::1]:") and response.status == 200
    await server.stop(drain_s=0)


async def open_stream(client: aiohttp.ClientSession) -> tuple[aiohttp.ClientResponse, bytes]:
    response = await client.post("/v1/chat/completions", json=chat(stream=True))
    return response, await response.content.readuntil(b"\n\n")


async def refused_as_draining(connection: RawConnection) -> None:
    """Ask until `stop` has taken effect."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            connection.send(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
            status, headers, _body = await connection.response()
            if status == 503:
                assert "retry-after" in headers
                return


async def test_the_end_is_announced_while_requests_are_still_taken(
    server: HttpServer, client: aiohttp.ClientSession
) -> None:
    server.announce_end()
    async with client.get("/ready") as response:
        assert response.status == 503 and int(response.headers["Retry-After"]) >= 1
    for stream in (False, True):
        async with client.post("/v1/chat/completions", json=chat(stream=stream)) as response:
            assert (response.status, response.headers["Connection"]) == (200, "close")
            assert await response.read()
    for path in ("/health", "/live"):
        assert (await client.get(path)).status == 200


async def test_stop_lets_a_stream_finish_and_takes_nothing_new(
    server: HttpServer, client: aiohttp.ClientSession, backend: ScriptedBackend, connect
) -> None:
    gate = asyncio.Event()
    backend.script = [GenerateOutput([1], "a"), gate, GenerateOutput([2], "b", "stop")]
    idle = await connect()
    idle.send(b"GET /ready HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (await idle.response())[0] == 200
    response, first = await open_stream(client)
    stopping = asyncio.create_task(server.stop(drain_s=60))
    await refused_as_draining(idle)
    idle.send(http_request("/v1/chat/completions", chat()))
    assert (await idle.response())[0] == 503
    gate.set()
    events = events_of(first + await response.read())
    assert events[-1] == "[DONE]" and events[-2]["choices"][0]["finish_reason"] == "stop"
    await stopping
    with pytest.raises(aiohttp.ClientConnectionError):
        await client.get("/live")


async def test_stop_ends_a_stream_that_takes_too_long_with_an_error(
    server: HttpServer, client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    backend.script = [GenerateOutput([1], "a"), asyncio.Event()]
    response, first = await open_stream(client)
    async with asyncio.timeout(DEADLINE_S):
        await server.stop(drain_s=0)
    *_, error, done = events_of(first + await response.read())
    assert error["error"]["type"] == "overloaded_error" and "shutting down" in error["error"]["message"]
    assert done == "[DONE]" and backend.closed.is_set()


async def test_stop_answers_a_request_that_has_no_output_yet(
    server: HttpServer, client: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    backend.script = [asyncio.Event()]
    asked = asyncio.create_task(client.post("/v1/chat/completions", json=chat()))
    async with asyncio.timeout(DEADLINE_S):
        await backend.entered.wait()
        await server.stop(drain_s=0)
        response = await asked
    assert response.status == 503 and response.headers["Retry-After"]
    assert backend.closed.is_set()
