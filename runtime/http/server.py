"""Binds the endpoint to a TCP port, and ends it without cutting streams."""

from __future__ import annotations

import asyncio
import errno
import socket

from aiohttp import web

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.http.app import create_app
from dynrt.runtime.http.backend import Backend
from dynrt.runtime.http.open_requests import OPEN_REQUESTS

SEND_BUFFER_BYTES = 64 * 1024  # the kernel's default takes 2.5 MB before a slow reader is noticed
BACKLOG = 1024
KEEPALIVE_S = 75.0  # longer than clients keep a pooled connection, so that they are the ones to close it
CLOSE_S = 2.0  # for handlers that were cut off to say so


class HttpServer:
    """The endpoint of one backend. `start` and `stop` are each called once."""

    def __init__(self, backend: Backend) -> None:
        self._app = create_app(backend)
        self._runner: web.AppRunner | None = None
        self._address = ("", 0)

    @property
    def url(self) -> str:
        """Where the server listens, without a path; valid once `start` has returned."""
        host, port = self._address
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def start(self, host: str = "127.0.0.1", port: int = 8000) -> None:
        """Listen on `host`:`port` (0: a free port). Raises ConfigError if that cannot be."""
        listener = await _listen(host, port)
        self._address = (host, listener.getsockname()[1])
        self._runner = web.AppRunner(
            self._app,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=CLOSE_S,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=BACKLOG).start()

    async def stop(self, drain_s: float) -> None:
        """Take nothing new, let running requests go on for up to `drain_s`, end the rest with an error, close."""
        if self._runner is None:
            return
        self._app[OPEN_REQUESTS].draining = True
        for site in self._runner.sites:
            await site.stop()
        await self._app[OPEN_REQUESTS].drain(drain_s)
        await self._runner.cleanup()
        self._runner = None


async def _listen(host: str, port: int) -> socket.socket:
    """A bound socket; connections accepted from it inherit its options."""
    loop = asyncio.get_running_loop()
    try:
        family, kind, protocol, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"cannot listen on {host}:{port}: the port is in use; choose another with --port (0: any free one)"
        )
    return ConfigError(
        f"cannot listen on {host}:{port}: {error.strerror or error}; choose another address with --host and --port"
    )
