"""The way out of a connection: straight into the socket while nothing is buffered for it.

A transport's own write costs as much again as the system call that it makes. It is left to the transport what the
socket does not take at once, what goes through TLS, and to find out why a write failed.
"""

from __future__ import annotations

import asyncio
import os

HIGH_WATER_BYTES = 64 * 1024  # the mark at which asyncio's and uvloop's transports pause whoever writes


class Outflow:
    """Also a requests.FrameSink for the body of a stream, between `begin_stream` and `end_stream`.

    Whoever owns the connection closes it when that is lost: before its descriptor is, and may become another's.
    """

    __slots__ = (
        "_descriptor",
        "_direct",
        "_is_chunked",
        "_takes_frames",
        "_transport",
        "has_written",
        "num_tokens",
    )

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        is_tls = transport.get_extra_info("sslcontext") is not None
        self._descriptor: int | None = None if is_tls else transport.get_extra_info("socket").fileno()
        self._direct = self._descriptor  # while bytes may go straight to it
        self._takes_frames = False
        self._is_chunked = False  # the body of the stream
        self.has_written = False  # since somebody reset it
        self.num_tokens = 0  # that were taken, likewise

    def close(self) -> None:
        self._takes_frames = False
        self._descriptor = self._direct = None

    @property
    def is_ready(self) -> bool:
        """For more of a stream: one has begun, and its reader is not slow."""
        return self._takes_frames and (self._direct is not None or self._has_room())

    def begin_stream(self, *, is_chunked: bool) -> None:
        """The head of a stream is about to be written; frames may come as soon as it has been."""
        self._is_chunked = is_chunked
        self._takes_frames = True
        self.num_tokens = 0

    def end_stream(self) -> None:
        self._takes_frames = False

    def take(self, frames: bytes, token_id: int) -> bool:
        """Send `frames` now, without waiting; False if it is not ready."""
        # As `is_ready` and `framed` have it: to call them makes a token a few percent dearer.
        if not self._takes_frames or (self._direct is None and not self._has_room()):
            return False
        if frames:
            self.write(b"%x\r\n%b\r\n" % (len(frames), frames) if self._is_chunked else frames)
        self.num_tokens += 1
        return True

    def framed(self, data: bytes) -> bytes:
        """One chunk of the stream's body; HTTP/1.0 has none."""
        return b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data

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
            self._transport.write(data[num_sent:])
            self._direct = None if self._transport.get_write_buffer_size() else self._descriptor

    def _has_room(self) -> bool:
        transport = self._transport
        return not transport.is_closing() and transport.get_write_buffer_size() <= HIGH_WATER_BYTES
