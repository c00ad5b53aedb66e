"""The way out of a connection for bytes that do not wait: straight into the socket while nothing is buffered for it.

A transport's own write costs as much again as the system call that it makes. It is left to the transport what the
socket does not take at once, what goes through TLS, and to find out why a write failed.
"""

from __future__ import annotations

import asyncio
import os

HIGH_WATER_BYTES = 64 * 1024  # the mark at which asyncio's and uvloop's transports pause whoever writes


class Outflow:
    """A requests.FrameSink for the body of one response, between `start` and `stop`.

    Whoever owns the connection stops it when that is lost: before its descriptor is closed, and may become another's.
    """

    __slots__ = ("_descriptor", "_direct", "_is_chunked", "_transport", "has_written", "num_tokens")

    def __init__(self, *, is_chunked: bool) -> None:
        self._is_chunked = is_chunked
        self._transport: asyncio.Transport | None = None  # from `start` to `stop`
        self._descriptor: int | None = None  # likewise, unless it is TLS
        self._direct: int | None = None  # the descriptor, while bytes may go straight to it
        self.has_written = False  # since somebody reset it
        self.num_tokens = 0  # that were taken, likewise

    def start(self, transport: asyncio.Transport) -> None:
        """The head of the response has been written."""
        self._transport = transport
        if transport.get_extra_info("sslcontext") is None:
            self._descriptor = transport.get_extra_info("socket").fileno()
        self.look()

    def stop(self) -> None:
        self._transport = self._descriptor = self._direct = None

    def look(self) -> None:
        """Go past the transport if it holds nothing that must come before; to be called behind each write to it."""
        is_clear = self._transport is not None and not self._transport.get_write_buffer_size()
        self._direct = self._descriptor if is_clear else None

    def take(self, frames: bytes, token_ids: list[int]) -> bool:
        """Send `frames` now, without waiting; False if the response has not started or its reader is slow."""
        if self._direct is None and not self._has_room():
            return False
        if frames:
            self._write(self.framed(frames))
            self.has_written = True
        self.num_tokens += len(token_ids)
        return True

    def framed(self, data: bytes) -> bytes:
        """One chunk of the body; HTTP/1.0 has none."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data

    def _has_room(self) -> bool:
        transport = self._transport
        return (
            transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() <= HIGH_WATER_BYTES
        )

    def _write(self, data: bytes) -> None:
        num_sent = 0
        if self._direct is not None:
            try:
                num_sent = os.write(self._direct, data)
            except OSError:
                num_sent = 0  # full, or broken: the transport meets the same, and knows what to do
        if num_sent < len(data):
            assert self._transport is not None, "there is room"
            self._transport.write(data[num_sent:])
            self.look()
