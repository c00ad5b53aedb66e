"""TLS: the certificate that is served is the newest one that works."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest
from certificates import FIRST_CERT, FIRST_KEY, SECOND_CERT, SECOND_KEY
from scripted_backend import DEADLINE_S, ScriptedBackend, chat, events_of

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.http.options import EndpointOptions
from dynrt.runtime.http.transport import server as server_module
from dynrt.runtime.http.transport.server import HttpServer


@pytest.fixture
def options(tmp_path: Path) -> EndpointOptions:
    write(tmp_path, FIRST_CERT, FIRST_KEY)
    return EndpointOptions(tls_cert=str(tmp_path / "cert.pem"), tls_key=str(tmp_path / "key.pem"))


def write(directory: Path, cert: str, key: str) -> None:
    (directory / "cert.pem").write_text(cert)
    (directory / "key.pem").write_text(key)


async def accepts(server: HttpServer, cert: str) -> bool:
    """Whether a client that trusts only `cert` is served."""
    context = ssl.create_default_context(cadata=cert)
    async with aiohttp.ClientSession(server.url) as client:
        try:
            async with client.get("/live", ssl=context) as response:
                return response.status == 200
        except aiohttp.ClientConnectorCertificateError:
            return False


async def test_a_stream_over_tls(serve, options: EndpointOptions) -> None:
    server = await serve(options)
    assert server.url.startswith("https://127.0.0.1:")
    context = ssl.create_default_context(cadata=FIRST_CERT)
    async with (
        aiohttp.ClientSession(server.url) as client,
        client.post("/v1/chat/completions", json=chat(stream=True), ssl=context) as response,
    ):
        assert events_of(await response.read())[-1] == "[DONE]"


async def test_a_new_certificate_is_served_without_a_restart(
    serve, options: EndpointOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "WATCH_S", 0.01)
    server = await serve(options)
    assert await accepts(server, FIRST_CERT) and not await accepts(server, SECOND_CERT)
    write(tmp_path, SECOND_CERT, SECOND_KEY)
    async with asyncio.timeout(DEADLINE_S):
        while not await accepts(server, SECOND_CERT):
            pass


async def test_a_certificate_with_the_key_of_another_changes_nothing(
    serve, options: EndpointOptions, tmp_path: Path
) -> None:
    server = await serve(options)
    write(tmp_path, SECOND_CERT, FIRST_KEY)
    server.reload()
    assert await accepts(server, FIRST_CERT)
    write(tmp_path, SECOND_CERT, SECOND_KEY)
    server.reload()
    assert await accepts(server, SECOND_CERT)


@pytest.mark.parametrize(
    ("cert", "key"), [(FIRST_CERT, SECOND_KEY), ("nonsense", FIRST_KEY), (FIRST_CERT, "")]
)
def test_files_that_do_not_go_together_are_told_at_the_start(
    backend: ScriptedBackend, options: EndpointOptions, tmp_path: Path, cert: str, key: str
) -> None:
    write(tmp_path, cert, key)
    with pytest.raises(ConfigError, match=rf"{tmp_path}/cert.pem.*{tmp_path}/key.pem"):
        HttpServer(backend, options)


@pytest.mark.parametrize("one", [{"tls_cert": "c"}, {"tls_key": "k"}])
def test_one_file_is_not_enough(backend: ScriptedBackend, one: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="both --tls-cert and --tls-key"):
        HttpServer(backend, EndpointOptions(**one))
