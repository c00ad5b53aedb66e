"""Remembers token ids of stretches of text between control tokens: system prompts, earlier turns, templates' words.

A tokenizer first looks for added tokens, from left to right, and then does the rest of its work within each stretch
between them. So a prompt's ids are those of its stretches and control tokens, one behind the other. This holds for
byte-level BPE whose control tokens take nothing of the text around them; for other tokenizers `cutter` says no.
"""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any

from tokenizers import Tokenizer

from dynrt.runtime.messages import pack_ids

LIMIT_BYTES = 8 << 20
LEAST_CHARS = 64  # shorter stretches are what users write, once; but for words
MOST_WORD_CHARS = 24  # control tokens, and what templates write beside them, such as "assistant\n"
WORDS_LIMIT = 1024
_LOCAL_STEPS = {"ByteLevel", "Digits", "Split"}  # pre-tokenizers that see no further than one stretch

Cut = Callable[[str], list[str]]


def cutter(tokenizer: Tokenizer) -> Cut | None:
    """Cuts a text before and behind each of its control tokens; some parts may be empty.

    None if its parts might be tokenized otherwise than the whole.
    """
    spec = json.loads(tokenizer.to_str())
    added = spec["added_tokens"]
    if not (_is_local(spec) and all(map(_stands_alone, added))):
        return None
    # Where several fit, the tokenizer takes the longest. Those that it looks for in normalized text come later.
    names = sorted((token["content"] for token in added if not token["normalized"]), key=len, reverse=True)
    if not names:
        return None
    return re.compile(f"({'|'.join(map(re.escape, names))})").split


def _is_local(spec: dict[str, Any]) -> bool:
    steps = spec["pre_tokenizer"] or {"type": "none"}
    kinds = {step["type"] for step in steps.get("pretokenizers", [steps])}
    return spec["model"]["type"] == "BPE" and not spec["model"].get("dropout") and kinds <= _LOCAL_STEPS


def _stands_alone(added: dict[str, Any]) -> bool:
    return not (added["lstrip"] or added["rstrip"] or added["single_word"])


class TokenCache:
    """Long stretches within a bound on memory, least recently used first out; words beside them, within one on number.

    Ids are packed (messages.pack_ids).

    May be called in any thread.
    """

    def __init__(
        self, tokenize: Callable[[str], list[int]], cut: Cut | None, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self._tokenize = tokenize
        self._cut = cut
        self._limit_bytes = limit_bytes
        self._words: dict[str, bytes] = {}
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._lock = Lock()
        self.num_bytes = 0  # estimated

    def ids(self, text: str) -> bytes:
        """Of all of `text`, without special tokens added."""
        if self._cut is None:
            return pack_ids(self._tokenize(text))
        words = self._words
        return b"".join([words.get(part) or self._of_part(part) for part in self._cut(text) if part])

    def _of_part(self, stretch: str) -> bytes:
        if len(stretch) <= MOST_WORD_CHARS:
            return self._of_new_word(stretch)
        if len(stretch) < LEAST_CHARS:
            return pack_ids(self._tokenize(stretch))
        with self._lock:
            known = self._known.get(stretch)
            if known is not None:
                self._known.move_to_end(stretch)
                return known
        ids = pack_ids(self._tokenize(stretch))
        with self._lock:
            self._keep(stretch, ids)
        return ids

    def _of_new_word(self, word: str) -> bytes:
        """Words have no order of use: too many of them are forgotten together, and those of templates come back."""
        if len(self._words) >= WORDS_LIMIT:
            self._words.clear()
        ids = self._words[word] = pack_ids(self._tokenize(word))
        return ids

    def _keep(self, stretch: str, ids: bytes) -> None:
        if stretch in self._known or _num_bytes(stretch, ids) > self._limit_bytes:
            return
        self._known[stretch] = ids
        self.num_bytes += _num_bytes(stretch, ids)
        while self.num_bytes > self._limit_bytes:
            self.num_bytes -= _num_bytes(*self._known.popitem(last=False))


def _num_bytes(stretch: str, ids: bytes) -> int:
    return len(stretch) + len(ids)
