"""HTTP/1.1's chunked coding (RFC 9112, 7.1), in which engines hand over events and fronts send them."""

from __future__ import annotations

LAST_CHUNK = b"0\r\n\r\n"


def as_chunk(data: bytes) -> bytes:
    """`data`, which must not be empty: an empty chunk ends the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def data_of(chunk: bytes) -> bytes:
    """What one chunk holds."""
    return chunk[chunk.index(b"\r\n") + 2 : -2]
