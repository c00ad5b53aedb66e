"""Remembers token ids of stretches of text between control tokens (system prompts, earlier turns), and of words.

A prompt's ids are those of its parts, one behind the other: see token_cuts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from sys import getsizeof
from threading import Lock

from dynrt.runtime.messages import pack_ids
from dynrt.runtime.token_cuts import Cuts

LIMIT_BYTES = 8 << 20
LEAST_CHARS = 64  # shorter stretches are what users write, once
MOST_WORD_CHARS = (
    24  # words are also control tokens, and what templates write beside them, such as "assistant\n"
)
WORDS_LIMIT = 16384
MOST_NEW_WORDS = (
    8  # in one text, or one in so many: each is tokenized by itself, which takes more than twice as long
)
MOST_TEXT_CHARS = 1 << 15  # longer ones are not cut into words: for 1 ms, no other thread would run


class TokenCache:
    """Long stretches within a bound on memory, least recently used first out; words beside them, within one on number.

    May be called in any thread. Ids are packed (messages.pack_ids).
    """

    def __init__(
        self, tokenize: Callable[[str], list[int]], cuts: Cuts, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._tokenize = tokenize
        self._cuts = cuts
        self._limit_bytes = limit_bytes
        self._words: dict[str, bytes] = {}
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()
        self.num_bytes = 0  # of the long ones, with their ids

    def ids(self, text: str) -> bytes:
        """Of all of `text`, without special tokens added."""
        cut = self._cuts.at_control_tokens
        if cut is None:
            return pack_ids(self._tokenize(text))
        words = self._words
        return b"".join([words.get(part) or self._of_stretch(part) for part in cut(text) if part])

    def _of_stretch(self, stretch: str) -> bytes:
        if len(stretch) <= MOST_WORD_CHARS:
            return self._of_new_word(stretch)
        if len(stretch) < LEAST_CHARS:
            return self._of_new_text(stretch)
        with self._lock:
            known = self._known.get(stretch)
            if known is not None:
                self._known.move_to_end(stretch)
                return known
        ids = self._of_new_text(stretch)
        with self._lock:
            self._keep(stretch, ids)
        return ids

    def _of_new_text(self, text: str) -> bytes:
        """By its words where nearly all of them are known."""
        cut = self._cuts.between_words
        if cut is None or not text.isascii() or len(text) > MOST_TEXT_CHARS:
            return pack_ids(self._tokenize(text))
        known, words = self._words.get, cut(text)
        new = [word for word in words if known(word) is None]
        if len(new) <= max(MOST_NEW_WORDS, len(words) // MOST_NEW_WORDS):
            return b"".join([known(word) or self._of_new_word(word) for word in words])
        for word in [word for word in new if len(word) <= MOST_WORD_CHARS][:MOST_NEW_WORDS]:
            self._of_new_word(word)  # so that such texts come to be known
        return pack_ids(self._tokenize(text))

    def _of_new_word(self, word: str) -> bytes:
        """Words have no order of use: too many of them are forgotten together, and those of templates come back."""
        ids = pack_ids(self._tokenize(word))
        if len(word) <= MOST_WORD_CHARS:
            if len(self._words) >= WORDS_LIMIT:
                self._words.clear()
            self._words[word] = ids
        return ids

    def _keep(self, stretch: str, ids: bytes) -> None:
        if stretch in self._known or _num_bytes(stretch, ids) > self._limit_bytes:
            return
        self._known[stretch] = ids
        self.num_bytes += _num_bytes(stretch, ids)
        while self.num_bytes > self._limit_bytes:
            self.num_bytes -= _num_bytes(*self._known.popitem(last=False))


def _num_bytes(stretch: str, ids: bytes) -> int:
    return getsizeof(stretch) + getsizeof(ids)
