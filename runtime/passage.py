"""How far a request has come, and the way on which most of its tokens go: past the reader, into the client's sink.

Most of what a token costs is memory that has gone cold since the last step, so this is all that a token touches.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

from dynrt.runtime.messages import TextDelta, TokenDelta
from dynrt.runtime.request_times import RequestTimes, StageTimes
from dynrt.runtime.requests import FrameSink

_NO_EPOCH = -1


class Passage:
    """One for each request, whatever the number of its attempts.

    It is open while the reader has dealt with everything and waits for more, and only for the attempt that is read.
    """

    __slots__ = (
        "_first_token_at",
        "_last_token_at",
        "_open_to",
        "_sink",
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
        self._open_to = _NO_EPOCH

    def open(self, epoch: int) -> None:
        """To what the attempt of this epoch brings, if there is a sink for it. It has brought a token before."""
        if self._sink is not None:
            self._open_to = epoch

    def close(self) -> None:
        self._open_to = _NO_EPOCH

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
    passages: Mapping[bytes, Passage], texts: Iterable[TextDelta], ended_at: float
) -> tuple[list[TokenDelta], list[float]]:
    """Send what a step that ended then brought past the readers of these requests, by key; others are over.

    Returns what must be read, as it finds no open passage or a full sink, and for each of the rest when its request
    had its last token.
    """
    unread: list[TokenDelta] = []
    last_token_at: list[float] = []
    for text in texts:  # what is done here is done for nearly every token
        passage = passages.get(text.key)
        if passage is None:
            continue
        sink = passage._sink
        if sink is None or text.epoch != passage._open_to or not sink.take(text.frames, text.token_id):
            unread.append(text.whole())
            continue
        passage.output_ids.append(text.token_id)
        passage.chars_sent += text.frame_chars
        last_token_at.append(passage._last_token_at)
        passage._last_token_at = ended_at
    return unread, last_token_at
