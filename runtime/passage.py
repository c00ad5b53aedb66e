"""How far a request has come, and the way on which most of its tokens go: past the reader, into the client's sink.

Most of what a token costs is memory that has gone cold since the last step, so this is all that a token touches.
"""

from __future__ import annotations

from array import array

from dynrt.runtime.messages import TextDelta, TokenDelta
from dynrt.runtime.request_times import RequestTimes
from dynrt.runtime.requests import FrameSink

_NO_EPOCH = -1


class Passage:
    """One for each request, whatever the number of its attempts.

    It is open while the reader has dealt with everything and waits for more, and only for the attempt that is read.
    """

    __slots__ = ("_open_to", "_sink", "chars_sent", "output_ids", "times")

    def __init__(self, times: RequestTimes, sink: FrameSink | None = None) -> None:
        self.times = times
        self.output_ids = array("I")  # a list would take ten times as much for each token of a long stream
        self.chars_sent = 0
        self._sink = sink
        self._open_to = _NO_EPOCH

    def open(self, epoch: int) -> None:
        """To what the attempt of this epoch brings, if there is a sink for it."""
        if self._sink is not None:
            self._open_to = epoch

    def close(self) -> None:
        self._open_to = _NO_EPOCH

    def note(self, delta: TokenDelta) -> None:
        """The client gets what `delta` says."""
        self.output_ids.extend(delta.token_ids)
        self.chars_sent += delta.num_chars

    def take(self, delta: TextDelta) -> bool:
        """Send `delta` past the reader; False if it must be read: not open, or a sink that is full."""
        if delta.epoch != self._open_to or not self._sink.take(delta.frames, delta.token_id):  # type: ignore[union-attr]  # it is open
            return False
        self.output_ids.append(delta.token_id)
        self.chars_sent += delta.frame_chars
        return True
