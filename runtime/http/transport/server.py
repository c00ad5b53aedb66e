"""The endpoint of one backend: listens, renews its keys and certificate, and ends without cutting streams."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.http.app import answer
from dynrt.runtime.http.backend import Backend
from dynrt.runtime.http.endpoint import Endpoint
from dynrt.runtime.http.options import EndpointOptions
from dynrt.runtime.http.transport.certificate import Certificate
from dynrt.runtime.http.transport.connection import Connection
from dynrt.runtime.http.transport.file_watch import FileWatch
from dynrt.runtime.http.transport.guard import Guard
from dynrt.runtime.http.transport.keys import ApiKeys
from dynrt.runtime.http.transport.listen import BACKLOG, listen_tcp, listen_unix, url_of
from dynrt.runtime.http_counts import HttpCounts

log = logging.getLogger("dynrt.http")

CLOSE_S = 2.0  # for handlers that were cut off to say so
WATCH_S = 2.0  # between two looks at the files of keys and certificate


class HttpServer:
    """`start` (or `start_unix`) and `stop` are each called once. Raises ConfigError for what cannot work."""

    def __init__(self, backend: Backend, options: EndpointOptions | None = None) -> None:
        self._options = options if options is not None else EndpointOptions()
        self._keys = _keys(self._options)
        self._certificate = _certificate(self._options)
        guard = Guard(self._keys, self._options.cors_origins, guard_metrics=self._options.guard_metrics)
        self._options.answer_formats.check()
        self._endpoint = Endpoint(backend, guard, self._options.answer_formats)
        self._connections: set[Connection] = set()
        self._acceptor: asyncio.Server | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._unix_path: Path | None = None
        self.url = ""  # where it listens, without a path; set by `start`

    async def start(self, host: str = "127.0.0.1", port: int = 8000, *, shared: bool = False) -> None:
        """Listen on `host`:`port` (0: a free port); beyond loopback only with keys, or if allowed without.

        `shared`: with other processes on one port.
        """
        listener = await listen_tcp(host, port, loopback_only=self._options.loopback_only, shared=shared)
        self.url = url_of(host, listener.getsockname()[1], tls=self._certificate is not None)
        await self.serve_on(listener)

    async def start_unix(self, path: Path, mode: int) -> None:
        """Listen on a unix socket at `path`; who may open the file (`mode`) may call."""
        listener = listen_unix(path, mode)
        self.url = f"unix:{path}"
        self._unix_path = path
        await self.serve_on(listener)

    async def serve_on(self, listener: socket.socket) -> None:
        """Accept connections from `listener`, which is already listening."""
        loop = asyncio.get_running_loop()
        context = None if self._certificate is None else self._certificate.context
        listen = loop.create_unix_server if listener.family == socket.AF_UNIX else loop.create_server
        self._acceptor = await listen(
            lambda: Connection(self._endpoint, answer, self._connections, loop),
            sock=listener,
            ssl=context,
            backlog=BACKLOG,
        )
        self._watcher = asyncio.create_task(self._watch(), name="keys and certificate")

    def reload(self) -> None:
        """Read keys and certificate again; what cannot be read is logged and stays as it was."""
        for part in (self._keys, self._certificate):
            try:
                if part is not None:
                    part.reload()
            except ConfigError as error:
                log.warning("not reloaded", extra={"reason": error.message})

    def take_counts(self) -> HttpCounts:
        """What was answered since the last call, for the metrics of a runtime elsewhere."""
        return self._endpoint.http_counter.take()

    def announce_end(self) -> None:
        """Tell load balancers (/ready is 503, answers close their connections) while still taking requests."""
        self._endpoint.open_requests.ending = True

    async def stop(self, drain_s: float) -> None:
        """Take nothing new, let running requests go on for up to `drain_s`, end the rest with an error, close."""
        if self._acceptor is None or self._watcher is None:
            return
        self._endpoint.open_requests.draining = True
        self._acceptor.close()
        self._watcher.cancel()
        [watched] = await asyncio.gather(self._watcher, return_exceptions=True)
        await self._endpoint.open_requests.drain(drain_s)
        await self._close_connections()
        self._acceptor = None
        if self._unix_path is not None:
            self._unix_path.unlink(missing_ok=True)
        if isinstance(watched, Exception):
            raise watched

    async def _close_connections(self) -> None:
        """Behind what they are answering, for which there is a little time."""
        for connection in self._connections:
            connection.close()
        tasks = [connection.task for connection in self._connections]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _watch(self) -> None:
        """Until cancelled."""
        options = self._options
        watch = FileWatch(filter(None, (options.api_key_file, options.tls_cert, options.tls_key)))
        while True:
            await asyncio.sleep(WATCH_S)
            if watch.changed():
                log.info("keys or certificate have changed")
                self.reload()


def check_options(options: EndpointOptions) -> None:
    """Raises ConfigError for what cannot be used: before a model is loaded for it."""
    options.answer_formats.check()
    _keys(options)
    _certificate(options)


def _keys(options: EndpointOptions) -> ApiKeys | None:
    if not options.api_keys and options.api_key_file is None:
        return None
    return ApiKeys(None if options.api_key_file is None else Path(options.api_key_file), options.api_keys)


def _certificate(options: EndpointOptions) -> Certificate | None:
    if options.tls_cert is None and options.tls_key is None:
        return None
    if options.tls_cert is None or options.tls_key is None:
        raise ConfigError("TLS needs both --tls-cert and --tls-key")
    return Certificate(options.tls_cert, options.tls_key)
