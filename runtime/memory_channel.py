"""A control socket inside one process, for virtual time: real bytes, in order per engine, each some time on its way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from dynrt.runtime.channel import OnMessage
from dynrt.runtime.errors import MailboxFullError
from dynrt.runtime.messages import FromEngine, ToEngine, decode_from_engine, decode_to_engine, encode

Delay = Callable[[], float]  # seconds that the next message is on its way


class Pipe:
    """One direction of one connection: first in, first out. While paused, what arrives waits."""

    def __init__(self, delay_s: Delay, deliver: Callable[[bytes], None]) -> None:
        self._delay_s = delay_s
        self._deliver = deliver
        self._under_way: deque[bytes] = deque()
        self._num_arrived = 0
        self._is_paused = False
        self._is_closed = False

    @property
    def backlog(self) -> int:
        """Messages that are not taken."""
        return len(self._under_way) if self._is_paused else 0

    def is_full(self, limit: int) -> bool:
        return self._is_paused and len(self._under_way) >= limit

    def put(self, payload: bytes) -> None:
        if not self._is_closed:
            self._under_way.append(payload)
            asyncio.get_running_loop().call_later(self._delay_s(), self._arrive)

    def pause(self) -> None:
        self._is_paused = True

    def close(self) -> None:
        self._is_closed = True
        self._under_way.clear()

    def _arrive(self) -> None:
        self._num_arrived += 1
        while self._num_arrived and self._under_way and not self._is_paused and not self._is_closed:
            self._num_arrived -= 1
            self._deliver(self._under_way.popleft())


class Connection:
    """An engine's end of the control socket."""

    def __init__(
        self, delay_s: Delay, to_engine: Callable[[ToEngine], None], to_runtime: Callable[[bytes], None]
    ):
        self.to_engine = Pipe(delay_s, lambda payload: to_engine(decode_to_engine(payload)))
        self.to_runtime = Pipe(delay_s, to_runtime)

    def send(self, message: FromEngine) -> None:
        self.to_runtime.put(encode(message))

    def hang(self) -> None:
        """The engine does not read any more."""
        self.to_engine.pause()

    def close(self) -> None:
        """The engine is dead; what it had sent still arrives."""
        self.to_engine.close()


class MemoryChannel:
    """A Channel. Engines come by `connect`."""

    def __init__(self, address: str, delay_s: Delay, outbox_limit: int = 10_000) -> None:
        self.address = address
        self._delay_s = delay_s
        self._outbox_limit = outbox_limit
        self._connections: dict[str, Connection] = {}
        self._on_message: OnMessage | None = None

    def open(self, on_message: OnMessage) -> None:
        self._on_message = on_message

    def send(self, incarnation: str, message: ToEngine) -> None:
        connection = self._connections.get(incarnation)
        if connection is None:
            return
        if connection.to_engine.is_full(self._outbox_limit):
            raise MailboxFullError(f"engine {incarnation} has not taken {self._outbox_limit} messages")
        connection.to_engine.put(encode(message))

    def forget(self, incarnation: str) -> None:
        connection = self._connections.pop(incarnation, None)
        if connection is not None:
            connection.close()

    def backlog(self) -> int:
        return sum(connection.to_engine.backlog for connection in self._connections.values())

    def close(self) -> None:
        self._on_message = None

    def connect(self, incarnation: str, on_message: Callable[[ToEngine], None]) -> Connection:
        """Called by engines."""
        connection = Connection(
            self._delay_s, on_message, lambda payload: self._receive(incarnation, payload)
        )
        self._connections[incarnation] = connection
        return connection

    def _receive(self, incarnation: str, payload: bytes) -> None:
        if self._on_message is not None:
            self._on_message(incarnation, decode_from_engine(payload))
