"""The runtime's sockets over ZeroMQ, to engines and to fronts: each a ROUTER, read through its file descriptor."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import zmq

from dynrt.runtime.errors import ConfigError, MailboxFullError
from dynrt.runtime.messages import (
    ADDRESS_KEY_SEPARATOR,
    HEARTBEAT_SUFFIX,
    FromEngine,
    ToEngine,
    decode_from_engine,
    encode,
)

log = logging.getLogger("dynrt.channel")

OUTBOX_LIMIT = 10_000  # messages; an engine that far behind counts as hung
RETRY_S = 0.005
DRAIN_BATCH = 256  # messages read before the loop may do something else
# As plain integers: each operation on zmq's flags takes as long as a system call.
AT_ONCE = int(zmq.NOBLOCK)
MORE_AT_ONCE = int(zmq.NOBLOCK | zmq.SNDMORE)
READABLE = int(zmq.POLLIN)

Buffer = bytes | memoryview
Sent = TypeVar("Sent")
Received = TypeVar("Received")


class ZmqRouter(Generic[Sent, Received]):
    """See Channel. `ipc://` needs no keys; `tcp://` is encrypted, and its address carries the server's public key."""

    def __init__(self, decode: Callable[[Buffer], Received], address: str | None = None) -> None:
        self._decode = decode
        self._requested = address
        self._address = ""
        self._directory: Path | None = None
        self._context = zmq.Context()
        self._outboxes: dict[str, list[bytes]] = {}  # what waits, by incarnation; none is empty
        self._flush_handle: asyncio.Handle | None = None
        self._retry: asyncio.TimerHandle | None = None

    @property
    def address(self) -> str:
        return self._address

    def open(self, on_message: Callable[[str, Received], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_message = on_message
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        # An engine that reconnects under its identity takes over from its own dead connection.
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        self._socket.set(zmq.LINGER, 0)
        try:
            self._address = self._bind(self._requested)
        except ConfigError:
            self._socket.close(0)  # `close` would wait for it for ever
            raise
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._polled = [(self._socket, READABLE)]
        self._loop.add_reader(self._descriptor, self._drain)
        self._drain()

    def send(self, incarnation: str, message: Sent) -> None:
        """It leaves at the end of this turn of the loop: all that a turn has for an engine is one message to ZeroMQ."""
        outbox = self._outboxes.get(incarnation)
        if outbox is None:
            outbox = self._outboxes[incarnation] = []
            self._flush_soon()
        elif len(outbox) >= OUTBOX_LIMIT:
            raise MailboxFullError(f"{incarnation} has not taken {OUTBOX_LIMIT} messages")
        outbox.append(encode(message))

    def forget(self, incarnation: str) -> None:
        self._outboxes.pop(incarnation, None)

    def backlog(self) -> int:
        return sum(map(len, self._outboxes.values()))

    def close(self) -> None:
        for handle in (self._flush_handle, self._retry):
            if handle is not None:
                handle.cancel()
        if self._address:
            self._loop.remove_reader(self._descriptor)
            self._socket.close(0)
        self._context.term()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _bind(self, requested: str | None) -> str:
        if requested is None:
            self._directory = Path(tempfile.mkdtemp(prefix="dynrt-"))  # mode 0700: only we can connect
            requested = f"ipc://{self._directory}/control"
        key = self._use_curve() if requested.startswith("tcp://") else ""
        try:
            self._socket.bind(requested)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen for engines at {requested!r}: {error.strerror}; choose another --control address"
            ) from error
        endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        return f"{endpoint}{ADDRESS_KEY_SEPARATOR}{key}" if key else endpoint

    def _use_curve(self) -> str:
        public, secret = zmq.curve_keypair()
        self._socket.set(zmq.CURVE_SERVER, 1)
        self._socket.set(zmq.CURVE_SECRETKEY, secret)
        return public.decode()

    def _flush_soon(self) -> None:
        if self._flush_handle is None:
            self._flush_handle = self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what waits, and come back for what is not taken.

        And read: the descriptor is edge-triggered, and a send may have consumed its edge.
        """
        self._flush_handle = None
        self._outboxes = {
            incarnation: outbox
            for incarnation, outbox in self._outboxes.items()
            if not self._send_now(incarnation, outbox)
        }
        if self._outboxes and self._retry is None:
            self._retry = self._loop.call_later(RETRY_S, self._try_again)
        if self._is_readable():
            self._drain()

    def _try_again(self) -> None:
        self._retry = None
        self._flush()

    def _send_now(self, incarnation: str, payloads: list[bytes]) -> bool:
        """Each as a frame, which whoever is there reads like a message: all of them, or none."""
        send = self._socket.send
        try:
            send(incarnation.encode(), MORE_AT_ONCE)
            for payload in payloads[:-1]:
                send(payload, MORE_AT_ONCE)
            send(payloads[-1], AT_ONCE)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            # Not connected (any more). Its pidfd or its missing heartbeat ends it; what it was told is lost with it.
            log.debug("message to nobody dropped", extra={"incarnation": incarnation})
        return True

    def _drain(self) -> None:
        """The descriptor tells that there is something to read, and now and then when there is not."""
        socket = self._socket
        for _ in range(DRAIN_BATCH):
            try:
                # A frame knows whether another one follows; to ask the socket for that takes longer than to read.
                identity, frame = socket.recv(AT_ONCE), socket.recv(AT_ONCE, copy=False)
                payload: Buffer = frame  # type: ignore[assignment]  # it is one, and a memoryview takes time to make
                while frame.more:
                    frame = socket.recv(AT_ONCE, copy=False)
                    payload = b"".join((payload, frame.bytes))
            except zmq.Again:
                return
            self._receive(identity, payload)
            if not self._is_readable():
                return
        self._flush_soon()  # and read on

    def _is_readable(self) -> bool:
        """Cheaper than to read in vain, and than to ask for zmq.EVENTS, which pyzmq looks up among its options."""
        return bool(zmq.zmq_poll(self._polled, 0))

    def _receive(self, identity: bytes, payload: Buffer) -> None:
        incarnation = identity.decode(errors="replace").removesuffix(HEARTBEAT_SUFFIX)
        try:
            message = self._decode(payload)
        except msgspec.DecodeError as error:
            log.warning("unreadable message", extra={"incarnation": incarnation, "error": str(error)})
            return
        self._on_message(incarnation, message)


class ZmqChannel(ZmqRouter[ToEngine, FromEngine]):
    """The control socket."""

    def __init__(self, address: str | None = None) -> None:
        super().__init__(decode_from_engine, address)
