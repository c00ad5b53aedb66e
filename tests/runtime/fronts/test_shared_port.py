"""A port for several processes: held without taking connections, shared by those that say so, refused to others."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.http.transport.listen import hold_port, listen_tcp, url_of

HOST = "127.0.0.1"


async def test_connections_go_to_those_that_listen() -> None:
    with ExitStack() as stack:
        held = stack.enter_context(await hold_port(HOST, 0, loopback_only=True))
        port = held.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, port)
        for _ in range(2):
            stack.enter_context(await listen_tcp(HOST, port, loopback_only=True, shared=True))
        _, writer = await asyncio.open_connection(HOST, port)
        writer.close()
        await writer.wait_closed()


async def test_a_held_port_is_in_use_for_everyone_else() -> None:
    with await hold_port(HOST, 0, loopback_only=True) as held:
        port = held.getsockname()[1]
        with await listen_tcp(HOST, port, loopback_only=True, shared=True):
            with pytest.raises(ConfigError, match="the port is in use"):
                await hold_port(HOST, port, loopback_only=True)
            with pytest.raises(ConfigError, match="the port is in use"):
                await listen_tcp(HOST, port, loopback_only=True)


async def test_only_loopback_is_held_without_a_key() -> None:
    with pytest.raises(ConfigError, match="without a key"):
        await hold_port("0.0.0.0", 0, loopback_only=True)


def test_urls() -> None:
    assert url_of(HOST, 80, tls=False) == "http://127.0.0.1:80"
    assert url_of("::1", 80, tls=True) == "https://[::1]:80"
