"""A scripted backend behind a real server on a loopback port, and clients for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import aiohttp
import pytest
import uvloop
from scripted_backend import RawConnection, ScriptedBackend

from dynrt.runtime.http.options import EndpointOptions
from dynrt.runtime.http.transport.server import HttpServer

Connect = Callable[[], Awaitable[RawConnection]]
Serve = Callable[[EndpointOptions], Awaitable[HttpServer]]
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, LoopFactory]:
    """What depends on the transport is tested on both event loops, the rest on asyncio's."""
    if item.path.stem in ("test_http_connections", "test_http_faults", "test_http_listen"):
        return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


@pytest.fixture
async def backend() -> ScriptedBackend:
    return ScriptedBackend()


@pytest.fixture
async def server(backend: ScriptedBackend) -> AsyncIterator[HttpServer]:
    server = HttpServer(backend)
    await server.start(port=0)
    yield server
    await server.stop(drain_s=0)


@pytest.fixture
async def serve(backend: ScriptedBackend) -> AsyncIterator[Serve]:
    """Starts servers of `backend` with options, on free ports."""
    servers: list[HttpServer] = []

    async def start(options: EndpointOptions) -> HttpServer:
        servers.append(HttpServer(backend, options))
        await servers[-1].start(port=0)
        return servers[-1]

    yield start
    for server in servers:
        await server.stop(drain_s=0)


@pytest.fixture
async def client(server: HttpServer) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(server.url, timeout=aiohttp.ClientTimeout(10)) as session:
        yield session


@pytest.fixture
async def connect(server: HttpServer) -> AsyncIterator[Connect]:
    opened: list[RawConnection] = []

    async def open_connection() -> RawConnection:
        host, port = server.url.removeprefix("http://").split(":")
        opened.append(RawConnection(*await asyncio.open_connection(host, int(port))))
        return opened[-1]

    yield open_connection
    for connection in opened:
        connection.abort()
