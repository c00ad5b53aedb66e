"""Messages over a Unix stream socket: several in a frame, 4 bytes of length (little-endian) before each frame."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from dynrt.runtime.errors import RankLostError

SEND_LIMIT_S = 10.0  # the other end reads all the time, unless it hangs
CHUNK_BYTES = 1 << 18

M = TypeVar("M")
_LENGTH = struct.Struct("<I")
_encode = msgspec.msgpack.Encoder().encode


class RankSocket(Generic[M]):
    """One end. What the kernel holds of unread messages is bounded; whoever sends more waits, up to SEND_LIMIT_S.

    `received`: the union of the messages that come. All methods raise RankLostError once the other end is gone.
    """

    def __init__(self, connection: socket.socket, received: Any) -> None:
        connection.setblocking(False)
        self._socket = connection
        self._decode = msgspec.msgpack.Decoder(list[received]).decode
        self._buffer = bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, messages: Sequence[msgspec.Struct]) -> None:
        body = _encode(messages)
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        deadline = time.monotonic() + SEND_LIMIT_S
        while frame:
            frame = frame[self._send_some(frame, deadline) :]

    def receive(self) -> list[M]:
        """All that has come; waits for nothing."""
        while self._read_chunk():
            pass
        messages: list[M] = []
        while (body := self._take_frame()) is not None:
            messages += self._decode(body)
        return messages

    def wait(self, timeout_s: float) -> bool:
        """Until something comes, or the other end is gone; whether it did."""
        return _wait(self._socket, select.POLLIN, timeout_s)

    def close(self) -> None:
        self._socket.close()

    def _send_some(self, frame: memoryview, deadline: float) -> int:
        try:
            return self._socket.send(frame)
        except BlockingIOError:
            if not _wait(self._socket, select.POLLOUT, deadline - time.monotonic()):
                raise RankLostError(f"nothing was read at the other end for {SEND_LIMIT_S:g} s") from None
            return 0
        except OSError as error:
            raise RankLostError(f"the process at the other end is gone: {error}") from error

    def _read_chunk(self) -> bool:
        """Whether there may be more."""
        try:
            chunk = self._socket.recv(CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise RankLostError(f"the process at the other end is gone: {error}") from error
        if not chunk:
            raise RankLostError("the process at the other end is gone")
        self._buffer += chunk
        return len(chunk) == CHUNK_BYTES

    def _take_frame(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return body


def _wait(connection: socket.socket, event: int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(connection, event)
    return bool(poller.poll(max(0.0, 1000 * timeout_s)))
