"""A step's chunks into many sockets: whatever each takes, its client gets all of it in order."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynrt.runtime.frame_sink import write_each


class Stream:
    """A sink over one end of a socket pair, whose descriptor goes as soon as something had to be buffered."""

    def __init__(self, stack: ExitStack) -> None:
        ours, self.client = (stack.enter_context(end) for end in socket.socketpair())
        ours.setblocking(False)
        self.client.setblocking(False)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        self.descriptor: int | None = ours.fileno()
        self.num_tokens = 0
        self.has_written = False
        self.rests: list[bytes] = []

    def take(self, chunk: bytes, token_id: int) -> bool:
        raise AssertionError("it has a descriptor")

    def write_rest(self, rest: bytes) -> None:
        self.rests.append(rest)

    def received(self) -> bytes:
        got = b""
        with suppress(BlockingIOError):
            while piece := self.client.recv(1 << 20):
                got += piece
        return got


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def write(streams: list[Stream], chunks: list[bytes]) -> None:
    write_each([stream.descriptor for stream in streams if stream.descriptor is not None], chunks, streams)


def test_each_gets_its_own(stack: ExitStack) -> None:
    streams = [Stream(stack) for _ in range(4)]
    write(streams, [b"a", b"bc", b"d", b"e"])
    assert [stream.received() for stream in streams] == [b"a", b"bc", b"d", b"e"]
    assert not any(stream.rests for stream in streams)


def test_of_none_there_is_nothing_to_write() -> None:
    write_each([], [], [])


@given(st.lists(st.sampled_from(["free", "full", "gone", "tight"]), min_size=1, max_size=8))
def test_what_one_does_not_take_is_its_sinks_and_holds_up_no_other(states: list[str]) -> None:
    with ExitStack() as stack:
        streams = [Stream(stack) for _ in states]
        for state, stream in zip(states, streams, strict=True):
            assert stream.descriptor is not None
            if state == "gone":
                stream.client.close()
            while state == "full":
                try:
                    os.write(stream.descriptor, b"before")
                except BlockingIOError:
                    break
        chunks = [os.urandom(1 << 20 if state == "tight" else 10) for state in states]
        write(streams, chunks)
        for state, stream, chunk in zip(states, streams, chunks, strict=True):
            if state == "gone":
                assert stream.rests == [chunk]
                continue
            got = stream.received()
            assert (got + b"".join(stream.rests)).removeprefix(b"before" * got.count(b"before")) == chunk
            assert bool(stream.rests) == (state != "free") and len(stream.rests) <= 1
