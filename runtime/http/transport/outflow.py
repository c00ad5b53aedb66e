"""The way out of a connection: straight into the socket while nothing is buffered for it.

A transport's own write costs as much again as the system call that it makes. It is left to the transport what the
socket does not take at once, what goes through TLS, and to find out why a write failed.
"""

from __future__ import annotations

import asyncio
import os

from dynrt.runtime.chunks import as_chunk

HIGH_WATER_BYTES = 64 * 1024  # the mark at which asyncio's and uvloop's transports pause whoever writes


class Outflow:
    """Also a FrameSink for the body of a stream in chunks, between `begin_stream` and `end_stream`.

    Whoever owns the connection closes it when that is lost: before its descriptor is, and may become another's.
    """

    __slots__ = (
        "_direct",
        "_is_chunked",
        "_is_streaming",
        "_own",
        "_transport",
        "descriptor",
        "has_written",
        "num_tokens",
    )

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        is_tls = transport.get_extra_info("sslcontext") is not None
        self._own: int | None = None if is_tls else transport.get_extra_info("socket").fileno()
        self._direct = self._own  # while bytes may go straight to it
        self._is_streaming = False
        self._is_chunked = False  # the body of the stream
        self.descriptor: int | None = None  # `_direct`, where chunks may go to it
        self.has_written = False
        self.num_tokens = 0

    def close(self) -> None:
        self._own = self._direct = None
        self.end_stream()

    @property
    def is_ready(self) -> bool:
        """For more of a stream: one has begun, and its reader is not slow."""
        return self._is_streaming and (self._direct is not None or self._has_room())

    def begin_stream(self, *, is_chunked: bool) -> None:
        """The head of a stream is about to be written; more may come as soon as it has been."""
        self._is_chunked = is_chunked
        self._is_streaming = True
        self.num_tokens = 0
        self._direct_to(self._direct)

    def end_stream(self) -> None:
        self._is_streaming = False
        self.descriptor = None

    def take(self, chunk: bytes, token_id: int) -> bool:
        """Send `chunk` now, without waiting; False if it is not ready, or not one for chunks."""
        if not (self.is_ready and self._is_chunked):
            return False
        if chunk:
            self.write(chunk)
        self.num_tokens += 1
        return True

    def framed(self, data: bytes) -> bytes:
        """One chunk of the stream's body; HTTP/1.0 has none."""
        return as_chunk(data) if self._is_chunked else data

    def write(self, data: bytes) -> None:
        """Send `data` behind what has been written; the transport buffers without end, see its `pause_writing`."""
        self.has_written = True
        num_sent = 0
        if self._direct is not None:
            try:
                num_sent = os.write(self._direct, data)
            except OSError:
                num_sent = 0  # full, or broken: the transport meets the same, and knows what to do
        if num_sent < len(data):
            self.write_rest(data[num_sent:])

    def write_rest(self, rest: bytes) -> None:
        """Send what the descriptor did not take; what comes behind it goes the same way, until the buffer is empty."""
        self._transport.write(rest)
        self._direct_to(None if self._transport.get_write_buffer_size() else self._own)

    def _direct_to(self, descriptor: int | None) -> None:
        self._direct = descriptor
        self.descriptor = descriptor if self._is_streaming and self._is_chunked else None

    def _has_room(self) -> bool:
        transport = self._transport
        return not transport.is_closing() and transport.get_write_buffer_size() <= HIGH_WATER_BYTES
