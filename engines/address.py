"""Connecting an engine's sockets to a runtime's control address."""

from __future__ import annotations

import zmq

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.messages import ADDRESS_KEY_SEPARATOR

KEY_CHARS = 40
OUTBOX_LIMIT = 10_000  # messages; an engine whose runtime has been away for that many forgets it


def connect_dealer(context: zmq.Context[zmq.Socket[bytes]], address: str, identity: str) -> zmq.Socket[bytes]:
    """A DEALER under this identity. Raises ConfigError for an address that cannot be one."""
    endpoint, _, key = address.partition(ADDRESS_KEY_SEPARATOR)
    is_tcp = endpoint.startswith("tcp://")
    if is_tcp and len(key) != KEY_CHARS:
        raise ConfigError(
            f"--join {address!r} lacks the runtime's key; use the whole address tcp://HOST:PORT#KEY that it logs"
        )
    socket = context.socket(zmq.DEALER)
    socket.set(zmq.IDENTITY, identity.encode())
    socket.set(zmq.LINGER, 0)
    socket.set(zmq.SNDHWM, OUTBOX_LIMIT)
    if is_tcp:
        _use_curve(socket, key)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close(0)
        raise ConfigError(
            f"--join {address!r} is no address ({error.strerror}); the runtime logs its address when it starts"
        ) from error
    return socket


def _use_curve(socket: zmq.Socket[bytes], key: str) -> None:
    public, secret = zmq.curve_keypair()
    socket.set(zmq.CURVE_SERVERKEY, key.encode())
    socket.set(zmq.CURVE_PUBLICKEY, public)
    socket.set(zmq.CURVE_SECRETKEY, secret)
