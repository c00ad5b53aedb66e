"""Where the server listens: unix sockets and their leftovers, and no address of the network without a key."""

from __future__ import annotations

import socket
import stat
from contextlib import closing
from pathlib import Path

import aiohttp
import pytest
from scripted_backend import ScriptedBackend, chat, events_of

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.http.options import EndpointOptions
from dynrt.runtime.http.transport.listen import listen_unix
from dynrt.runtime.http.transport.server import HttpServer


async def test_a_stream_over_a_unix_socket(backend: ScriptedBackend, tmp_path: Path) -> None:
    path = tmp_path / "dynrt.sock"
    server = HttpServer(backend)
    await server.start_unix(path, 0o640)
    assert server.url == f"unix:{path}"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    connector = aiohttp.UnixConnector(str(path))
    async with (
        aiohttp.ClientSession("http://localhost", connector=connector) as client,
        client.post("/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        assert events_of(await response.read())[-1] == "[DONE]"
    await server.stop(drain_s=0)
    assert not path.exists()


def test_a_socket_that_is_left_over_is_replaced(tmp_path: Path) -> None:
    listen_unix(tmp_path / "s", 0o600).close()
    listen_unix(tmp_path / "s", 0o600).close()


def test_a_socket_in_use_is_refused(tmp_path: Path) -> None:
    with (
        closing(listen_unix(tmp_path / "s", 0o600)),
        pytest.raises(ConfigError, match=rf"{tmp_path}/s: another process.*--uds"),
    ):
        listen_unix(tmp_path / "s", 0o600)


def test_a_file_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "s").write_text("precious")
    with pytest.raises(ConfigError, match="no socket"):
        listen_unix(tmp_path / "s", 0o600)
    assert (tmp_path / "s").read_text() == "precious"


@pytest.mark.parametrize("name", ["no/such/folder", "x" * 200])
def test_a_path_that_cannot_be(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="--uds"):
        listen_unix(tmp_path / name, 0o600)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_the_network_is_not_let_in_without_a_key(backend: ScriptedBackend, host: str) -> None:
    if host == "::" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with pytest.raises(ConfigError, match=r"--api-key-file or DYNRT_API_KEYS.*--allow-unauthenticated"):
        await HttpServer(backend).start(host, 0)


@pytest.mark.parametrize(
    "options", [EndpointOptions(api_keys=("k",)), EndpointOptions(allow_unauthenticated=True)]
)
async def test_the_network_is_let_in_with_a_key_or_if_told(
    backend: ScriptedBackend, options: EndpointOptions
) -> None:
    server = HttpServer(backend, options)
    await server.start("0.0.0.0", 0)
    await server.stop(drain_s=0)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2"])
async def test_loopback_needs_no_key(backend: ScriptedBackend, host: str) -> None:
    server = HttpServer(backend)
    await server.start(host, 0)
    await server.stop(drain_s=0)
