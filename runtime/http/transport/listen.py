"""Opens the socket that the endpoint listens on: a TCP port or a path."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import stat
from contextlib import closing
from ipaddress import ip_address
from pathlib import Path

from dynrt.runtime.errors import ConfigError

SEND_BUFFER_BYTES = 64 * 1024  # the kernel's default takes 2.5 MB before a slow reader is noticed
BACKLOG = 1024


async def listen_tcp(host: str, port: int, *, loopback_only: bool, shared: bool = False) -> socket.socket:
    """A listening socket; connections accepted from it inherit its options. Raises ConfigError.

    `loopback_only`: refuse an address that other machines can reach. `shared`: other processes of this user may
    listen there too, if they say so as well; the kernel gives each connection to one of them.
    """
    listener = await _bind(host, port, loopback_only=loopback_only, shared=shared)
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from None
    return listener


async def hold_port(host: str, port: int, *, loopback_only: bool) -> socket.socket:
    """A socket that keeps a port for processes that will share it; takes no connections. Raises ConfigError.

    A port that others have is refused, even if they share it among themselves.
    """
    with await _bind(host, port, loopback_only=loopback_only, shared=False) as probe:
        found = probe.getsockname()[1]
    return await _bind(host, found, loopback_only=loopback_only, shared=True)


def url_of(host: str, port: int, *, tls: bool) -> str:
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _bind(host: str, port: int, *, loopback_only: bool, shared: bool) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        family, kind, protocol, _, address = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM))[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _cannot_listen(host, port, error) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        if loopback_only:
            _refuse_others(listener)
    except (OSError, ConfigError) as error:
        listener.close()
        raise error if isinstance(error, ConfigError) else _cannot_listen(host, port, error) from None
    return listener


def _refuse_others(listener: socket.socket) -> None:
    address = listener.getsockname()[0]
    if not ip_address(address).is_loopback:
        raise ConfigError(
            f"listening on {address} would let anyone who reaches this machine use it without a key; "
            "set API keys with --api-key-file or DYNRT_API_KEYS, or say --allow-unauthenticated"
        )


def listen_unix(path: Path, mode: int) -> socket.socket:
    """A listening unix socket whose file has `mode`; one that nobody listens on is replaced. Raises ConfigError."""
    _remove_stale(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        listener.bind(str(path))
        os.chmod(path, mode)  # in time: nobody can connect before the next line
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise _unusable(path, error.strerror or str(error)) from None
    return listener


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise _unusable(path, "a file is there that is no socket")
        with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            probe.connect(str(path))
    except ConnectionRefusedError:
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from None
    else:
        raise _unusable(path, "another process listens there")


def _unusable(path: Path, reason: str) -> ConfigError:
    return ConfigError(f"cannot listen at {path}: {reason}; choose another path with --uds")


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"cannot listen on {host}:{port}: the port is in use; choose another with --port (0: any free one)"
        )
    return ConfigError(
        f"cannot listen on {host}:{port}: {error.strerror or error}; choose another address with --host and --port"
    )
