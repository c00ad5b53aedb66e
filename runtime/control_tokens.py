"""Keeps control tokens that users write from being taken for those that the chat template writes.

In user text the first character of every control token is swapped for a noncharacter (U+FDD0 and up, which Unicode
reserves for such internal use): same length, so templates cut and trim as before, but the tokenizer finds no
control token there. Its normalizer swaps the character back, after control tokens were looked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer, normalizers

from dynrt.runtime.errors import InvalidRequestError, ModelLoadError

_FIRST_NONCHARACTER = 0xFDD0
_NUM_NONCHARACTERS = 32
_STAND_INS = (
    f"{chr(_FIRST_NONCHARACTER)}-{chr(_FIRST_NONCHARACTER + _NUM_NONCHARACTERS - 1)}"  # within a regex's []
)
_NONCHARACTERS = re.compile(f"[{_STAND_INS}]")
_REPLACEMENT = "\ufffd"


class ControlTokens:
    """Installs itself into `tokenizer`. Control tokens are those that the tokenizer calls special."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.get_added_tokens_decoder()
        self._ids = {token.content: i for i, token in added.items() if token.special and token.content}
        firsts = sorted({token[0] for token in self._ids})
        if len(firsts) > _NUM_NONCHARACTERS:
            raise ModelLoadError(
                f"the tokenizer's control tokens begin with {len(firsts)} different characters"
            )
        stand_ins = {first: chr(_FIRST_NONCHARACTER + i) for i, first in enumerate(firsts)}
        self._hidden = {token: stand_ins[token[0]] + token[1:] for token in self._ids}
        self._originals = str.maketrans({stand_in: first for first, stand_in in stand_ins.items()})
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._firsts = firsts
        _swap_back_when_normalizing(tokenizer, stand_ins)
        self._unhidable = {t for t, i in self._ids.items() if i in self._encode_hidden(tokenizer, t)}

    def hide(self, value: Any) -> Any:
        """`value` (JSON-like) with its control tokens hidden; itself if it has none.

        Raises InvalidRequestError for one that cannot be hidden.
        """
        text = _all_text(value)
        return self._hidden_in(value) if text is None or self._is_suspect(text) else value

    def _is_suspect(self, text: str) -> bool:
        """Whether a control token or a stand-in might be in it, by what is told a hundred times as fast."""
        return not text.isascii() or any(map(text.__contains__, self._firsts))

    def _hidden_in(self, value: Any) -> Any:
        if isinstance(value, str):
            if not self._is_suspect(value):
                return value
            return self._pattern.sub(self._hidden_form, scrub(value))
        if isinstance(value, Mapping):
            return {self._hidden_in(key): self._hidden_in(item) for key, item in value.items()}
        if isinstance(value, Sequence):
            return [self._hidden_in(item) for item in value]
        return value

    def reveal(self, text: str) -> str:
        return text.translate(self._originals)

    def _hidden_form(self, match: re.Match[str]) -> str:
        token = match[0]
        if token in self._unhidable:
            raise InvalidRequestError(
                f"the messages contain {token!r}, which this model's tokenizer cannot tell from its control token; "
                "leave it out",
                param="messages",
            )
        return self._hidden[token]

    def _encode_hidden(self, tokenizer: Tokenizer, token: str) -> list[int]:
        ids: list[int] = tokenizer.encode(self._hidden[token], add_special_tokens=False).ids
        return ids


def _all_text(value: Any) -> str | None:
    """What is text in `value`, all as one in no order; None if there is something in it that JSON does not have."""
    texts: list[str] = []
    parts: list[Any] = [value]
    for part in parts:  # which grow meanwhile
        kind = type(part)
        if kind is str:
            texts.append(part)
        elif kind is dict:
            parts += part
            parts += part.values()
        elif kind is list:
            parts += part
        elif part is not None and not isinstance(part, int | float):
            return None
    return "".join(texts)


def scrub(text: str) -> str:
    """Noncharacters become U+FFFD, as Unicode advises for text from outside."""
    return _NONCHARACTERS.sub(_REPLACEMENT, text)


def _swap_back_when_normalizing(tokenizer: Tokenizer, stand_ins: Mapping[str, str]) -> None:
    steps: list[Any] = [normalizers.Replace(stand_in, first) for first, stand_in in stand_ins.items()]
    if tokenizer.normalizer is not None:
        steps.append(tokenizer.normalizer)
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
