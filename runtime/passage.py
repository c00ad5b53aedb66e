"""How far a request has come, and the way on which most of its tokens go: past the reader, into the client's sink.

Most of what a token costs is memory that has gone cold since the last step, so this is all that a token touches.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

from dynrt.runtime.frame_sink import FrameSink, write_each
from dynrt.runtime.messages import TextDelta, TokenDelta
from dynrt.runtime.request_times import RequestTimes, StageTimes
from dynrt.transfer.events import HandoffId


class Passage:
    """One for each request, whatever the number of its attempts.

    It is open while the reader has dealt with everything and waits for more.
    """

    __slots__ = (
        "_first_token_at",
        "_last_token_at",
        "_sink",
        "_way",
        "attempt_id",
        "began_at",
        "chars_sent",
        "output_ids",
        "stages",
    )

    def __init__(self, began_at: float, sink: FrameSink | None = None) -> None:
        self.began_at = began_at
        self.stages: list[StageTimes] = []
        self.output_ids = array("I")  # a list would take ten times as much for each token of a long stream
        self.chars_sent = 0
        self._first_token_at: float | None = None
        self._last_token_at = 0.0  # once there is a first
        self._sink = sink
        self._way: FrameSink | None = None  # while it is open, if there is one
        self.attempt_id: HandoffId = b"", 0  # of the attempt that brings its tokens

    def open(self) -> None:
        """To what the attempt brings, if there is a sink for it. It has brought a token before."""
        self._way = self._sink

    def close(self) -> None:
        self._way = None

    def note(self, delta: TokenDelta) -> None:
        """The client gets what `delta` says."""
        self.output_ids.extend(delta.token_ids)
        self.chars_sent += delta.num_chars

    def come(self, ended_at: float) -> float | None:
        """The step that ended then brought it tokens. Returns when the one before did, None if there was none."""
        before = self._last_token_at
        self._last_token_at = ended_at
        if self._first_token_at is not None:
            return before
        self._first_token_at = ended_at
        return None

    def times(self) -> RequestTimes:
        last_token_at = None if self._first_token_at is None else self._last_token_at
        return RequestTimes(self.began_at, self._first_token_at, last_token_at, self.stages)


def pass_on(
    passages: Mapping[int, Passage], texts: Iterable[TextDelta], ended_at: float
) -> tuple[list[TokenDelta], list[float]]:
    """Send what a step that ended then brought past the readers of these attempts, by number; others are over.

    Returns what must be read, as it finds no open passage or a full sink, and for each of the rest when its request
    had its last token.
    """
    unread: list[TokenDelta] = []
    last_token_at: list[float] = []
    descriptors: list[int] = []
    chunks: list[bytes] = []
    sinks: list[FrameSink] = []
    for text in texts:  # what is done here is done for nearly every token
        passage = passages.get(text.number)
        if passage is None:
            continue
        sink, chunk = passage._way, text.chunk
        if sink is not None and (descriptor := sink.descriptor) is not None:
            sink.num_tokens += 1
            if chunk:
                sink.has_written = True
                descriptors.append(descriptor)
                chunks.append(chunk)
                sinks.append(sink)
        elif sink is None or not sink.take(chunk, text.token_id):
            unread.append(text.whole(*passage.attempt_id))
            continue
        passage.output_ids.append(text.token_id)
        passage.chars_sent += text.num_chars
        last_token_at.append(passage._last_token_at)
        passage._last_token_at = ended_at
    write_each(descriptors, chunks, sinks)
    return unread, last_token_at
