"""From output tokens to the text that may be sent: whole characters only, and nothing of a stop string.

A stream is a pure function of (prompt ids, output ids, characters emitted). It goes token by token and keeps no
other state, so cutting the tokens differently, or resuming on another worker, never changes the text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import msgspec
from tokenizers import Tokenizer

from dynrt.engines.stop_strings import StopFinder
from dynrt.engines.token_bytes import TokenBytes, token_bytes

_MAX_CHAR_BYTES = 4
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


class TextPiece(msgspec.Struct, frozen=True):
    """What one push brought."""

    text: str
    stopped: str | None = None  # the stop string that ends the text


class TextStream:
    """See the module. Made by `resume`, also for a request that has no output yet."""

    def __init__(
        self,
        pieces: TokenBytes,
        prompt_ids: Sequence[int],
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        shown_special_tokens: Sequence[str] = (),
    ) -> None:
        self._pieces = pieces
        self._stops = frozenset(stop)
        self._finder = StopFinder(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._shown = frozenset(shown_special_tokens)
        self._num_tokens = 0
        self._held = ""  # characters that are not sent yet
        self._skip_chars = 0  # characters that were sent before this stream was resumed
        self._stopped: str | None = None
        self._has_bytes = False  # the output has spelled something
        self._drop_space = pieces.drops_first_space and not pieces.has_text(prompt_ids)
        self._utf8 = _utf8_decoder("replace")
        self._utf8.decode(pieces.tail(prompt_ids, _MAX_CHAR_BYTES))  # a prompt may end inside a character

    @classmethod
    def resume(
        cls,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        chars_emitted: int,
        *,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        shown_special_tokens: Sequence[str] = (),
    ) -> TextStream:
        """Continue behind `output_ids`, of whose text the first `chars_emitted` characters were sent.

        `stop`: no empty strings. The text of the first `min_tokens` tokens is not searched for them.
        `shown_special_tokens`: those whose names are text; other special tokens are none.
        Text that `output_ids` make ready but that was not sent comes with the next push or finish.
        """
        pieces = token_bytes(tokenizer)
        stream = cls(
            pieces,
            prompt_ids,
            stop=stop,
            include_stop=include_stop,
            min_tokens=min_tokens,
            shown_special_tokens=shown_special_tokens,
        )
        stream._skip_chars = chars_emitted
        for token_id in output_ids:
            stream._take(token_id)
            stream._release(
                min(stream._skip_chars, stream._num_ready)
            )  # else the text held would grow and grow
        return stream

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text."""
        return self._stopped

    def push(self, token_ids: Sequence[int]) -> TextPiece:
        """Text that these tokens make ready. Tokens behind a stop string are ignored."""
        if not (self._stops or self._held or self._skip_chars):  # as nearly always: what is spelled is ready
            return TextPiece("".join([self._spell(token_id) for token_id in token_ids]))
        for token_id in token_ids:
            self._take(token_id)
        return TextPiece(self._release(self._num_ready), self._stopped)

    def finish(self) -> str:
        """The rest: nothing more comes that could complete a stop string or a character."""
        if self._stopped is None:
            self._held += self._cut_character()
        return self._release(len(self._held))

    @property
    def _num_ready(self) -> int:
        """How many of the held characters cannot be part of a stop string any more."""
        return len(self._held) - (self._finder.held_chars if self._stopped is None else 0)

    def _take(self, token_id: int) -> None:
        if self._stopped is not None:
            return
        self._num_tokens += 1
        special = self._pieces.special_tokens.get(token_id)
        if special is not None and special in self._stops and self._num_tokens > self._min_tokens:
            self._end(special, self._held + self._cut_character(), special)
            return
        self._extend(self._spell(token_id))

    def _cut_character(self) -> str:
        """What stands for a character that the text ends inside of; if only the prompt did, it is none of ours."""
        return self._utf8.decode(b"", final=True) if self._has_bytes else ""

    def _spell(self, token_id: int) -> str:
        """The characters that end in this token."""
        pieces = self._pieces
        spelled = pieces[token_id]
        if not spelled and token_id in pieces.special_tokens:
            special = pieces.special_tokens[token_id]
            spelled = special.encode() if special in self._shown else b""
        elif self._drop_space and spelled:
            self._drop_space = False
            spelled = spelled.removeprefix(b" ")
        self._has_bytes = self._has_bytes or bool(spelled)
        return self._utf8.decode(spelled)

    def _extend(self, text: str) -> None:
        found = self._finder.feed(text) if self._num_tokens > self._min_tokens else None
        if found is None:
            self._held += text
            return
        end, stop = found
        self._end(stop, (self._held + text[:end])[: -len(stop)], stop)

    def _end(self, stop: str, text_before: str, shown: str) -> None:
        self._stopped = stop
        self._held = text_before + (shown if self._include_stop else "")

    def _release(self, num_chars: int) -> str:
        """Let go of the first `num_chars` held; what of them was sent before is not returned."""
        released, self._held = self._held[:num_chars], self._held[num_chars:]
        skipped = min(self._skip_chars, num_chars)
        self._skip_chars -= skipped
        return released[skipped:]
