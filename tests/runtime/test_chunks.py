"""HTTP/1.1's chunked coding: there and back, and read by a parser nobody here wrote."""

from __future__ import annotations

import http.client
import io

from hypothesis import given
from hypothesis import strategies as st

from dynrt.runtime.chunks import LAST_CHUNK, as_chunk, data_of


@given(st.lists(st.binary(min_size=1, max_size=300)))
def test_the_standard_library_reads_the_same(pieces: list[bytes]) -> None:
    body = b"".join(map(as_chunk, pieces)) + LAST_CHUNK
    response = http.client.HTTPResponse(
        _Socket(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
    )
    response.begin()
    assert response.read() == b"".join(pieces)


@given(st.binary(min_size=1))
def test_there_and_back(data: bytes) -> None:
    assert data_of(as_chunk(data)) == data


class _Socket:
    def __init__(self, received: bytes) -> None:
        self._received = received

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._received)
