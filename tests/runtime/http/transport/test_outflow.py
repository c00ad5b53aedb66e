"""Ready events past a transport: in order whatever the socket takes, and none once the connection is lost."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from dynrt.runtime.http.transport.outflow import HIGH_WATER_BYTES, Outflow


class Transport(asyncio.Transport):
    """Keeps what it is given, as if the socket took nothing more, unless it is told to pass it on."""

    def __init__(self, descriptor_of: socket.socket, *, is_tls: bool = False) -> None:
        super().__init__({"socket": descriptor_of, "sslcontext": object() if is_tls else None})
        self.buffered = b""
        self.passes_on = False
        self.has_passed_on = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self.passes_on:
            self.buffered += bytes(data)
            return
        self.get_extra_info("socket").sendall(data)
        self.has_passed_on += bytes(data)

    def get_write_buffer_size(self) -> int:
        return len(self.buffered)

    def is_closing(self) -> bool:
        return False


def streaming(transport: Transport, *, is_chunked: bool = True) -> Outflow:
    outflow = Outflow(transport)
    outflow.begin_stream(is_chunked=is_chunked)
    return outflow


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, clients = socket.socketpair()
    ours.setblocking(False)
    clients.setblocking(False)
    with ours, clients:
        yield ours, clients


def test_nothing_goes_out_before_the_head_nor_behind_the_end(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, clients = ends
    outflow = Outflow(Transport(ours))
    assert outflow.descriptor is None and not outflow.take(b"early", 1)
    outflow.begin_stream(is_chunked=True)
    assert outflow.descriptor == ours.fileno() and outflow.take(b"data", 1)
    outflow.end_stream()
    assert outflow.descriptor is None and not outflow.take(b"late", 1)
    assert (clients.recv(100), outflow.num_tokens, outflow.has_written) == (b"data", 1, True)


def test_what_the_socket_does_not_take_and_all_behind_it_wait_in_the_transport_up_to_its_mark(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, clients = ends
    transport = Transport(ours)
    outflow = streaming(transport)
    sent, letters = b"", iter(os.urandom(4096) for _ in range(4096))
    while outflow.take(piece := next(letters), 1):
        sent += piece
    assert outflow.descriptor is None, "a chunk that is written there would come before those that wait"
    assert HIGH_WATER_BYTES < len(transport.buffered) <= HIGH_WATER_BYTES + 4096
    received = b""
    while len(received) + len(transport.buffered) < len(sent):
        received += clients.recv(1 << 20)
    assert received + transport.buffered == sent


def test_behind_an_emptied_transport_it_goes_straight_to_the_socket_again(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, clients = ends
    transport = Transport(ours)
    outflow = streaming(transport)
    while not transport.buffered:
        outflow.take(b"x" * 4096, 1)
    with suppress(BlockingIOError):
        while clients.recv(1 << 20):
            pass
    transport.buffered, transport.passes_on = b"", True
    assert outflow.take(b"first", 1) and transport.has_passed_on == b"first"
    assert outflow.take(b"second", 1) and transport.has_passed_on == b"first"
    assert clients.recv(100) == b"firstsecond" and outflow.descriptor == ours.fileno()


def test_what_its_descriptor_left_comes_before_all_that_follows(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ours, clients = ends
    transport = Transport(ours)
    outflow = streaming(transport)
    outflow.write_rest(b"rest")
    assert outflow.descriptor is None and outflow.take(b" and more", 1)
    assert transport.buffered == b"rest and more"
    outflow.close()
    transport.buffered = b""
    assert outflow.descriptor is None and not outflow.take(b"late", 1)
    with pytest.raises(BlockingIOError):
        clients.recv(1)


def test_a_body_without_chunks_is_not_for_ready_ones(ends: tuple[socket.socket, socket.socket]) -> None:
    outflow = streaming(Transport(ends[0]), is_chunked=False)
    assert outflow.is_ready and outflow.descriptor is None and not outflow.take(b"1\r\nx\r\n", 1)


def test_a_broken_socket_is_the_transports_to_find_out(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, clients = ends
    transport = Transport(ours)
    outflow = streaming(transport)
    clients.close()
    assert outflow.take(b"data", 1) and transport.buffered == b"data"


def test_what_is_encrypted_goes_through_the_transport(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, _ = ends
    transport = Transport(ours, is_tls=True)
    outflow = streaming(transport)
    assert outflow.descriptor is None and outflow.take(b"data", 1) and transport.buffered == b"data"
