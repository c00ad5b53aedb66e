"""A front's socket to the runtime, read through its file descriptor on the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from dynrt.runtime.errors import MailboxFullError
from dynrt.runtime.fronts.messages import FromFront, ToFront, decode_to_front, encode

OUTBOX_LIMIT = 10_000  # messages; a runtime that far behind hangs
READ_BATCH = 256  # messages read before the loop may do something else


class Link:
    """Open from its construction."""

    def __init__(self, address: str, name: str, on_message: Callable[[ToFront], None]) -> None:
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, name.encode())
        self._socket.set(zmq.SNDHWM, OUTBOX_LIMIT)
        self._socket.connect(address)
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._read)

    def send(self, message: FromFront) -> None:
        """Raises MailboxFullError."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            raise MailboxFullError(
                f"the runtime has not taken {OUTBOX_LIMIT} messages of this front"
            ) from None
        self._loop.call_soon(self._read)  # the descriptor is edge-triggered, and a send may consume its edge

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        self._context.destroy(linger=0)

    def _read(self) -> None:
        for _ in range(READ_BATCH):
            if self._socket.closed:
                return
            try:
                payload = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_message(decode_to_front(payload))
        self._loop.call_soon(self._read)
