"""What each token adds to the text, as bytes: the part of a tokenizer's decoder that streaming needs.

`Tokenizer.decode` maps a whole sequence at once and so cannot say which bytes one token brought. For the two
families that generate text (byte-level BPE, and SentencePiece with or without byte fallback) every token stands
for fixed bytes, except that SentencePiece drops the space before the first word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer

from dynrt.runtime.errors import ModelLoadError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "▁"
_BYTE_LEVEL_STEPS = {"ByteLevel", "Fuse"}
_SENTENCEPIECE_STEPS = {"ByteFallback", "Fuse", "Strip", "Metaspace"}  # and Replace of the word start


class TokenBytes:
    """Token id to bytes, and the special tokens' own names. Shared by all streams of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        steps = _decoder_steps(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.special_tokens: dict[int, str] = {
            i: token.content for i, token in added.items() if token.special
        }
        self._tokenizer = tokenizer
        self._is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
        self.drops_first_space = any(_drops_first_space(step) for step in steps)
        self._known: dict[int, bytes] = dict.fromkeys(self.special_tokens, b"")

    def __getitem__(self, token_id: int) -> bytes:
        """Special tokens, and ids beyond the vocabulary (padded embeddings can yield them), are no text."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._spell(token_id)
        return known

    def join(self, token_ids: Iterable[int]) -> bytes:
        return b"".join(self[token_id] for token_id in token_ids)

    def has_text(self, token_ids: Iterable[int]) -> bool:
        return any(self[token_id] for token_id in token_ids)

    def tail(self, token_ids: Sequence[int], num_bytes: int) -> bytes:
        """The last `num_bytes` or a few more (or all there are) of what `token_ids` stand for."""
        pieces: list[bytes] = []
        for token_id in reversed(token_ids):
            if num_bytes <= 0:
                break
            pieces.append(self[token_id])
            num_bytes -= len(pieces[-1])
        return b"".join(reversed(pieces))

    def _spell(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        return _byte_level(piece) if self._is_byte_level else _sentencepiece(piece)


@lru_cache(maxsize=4)
def token_bytes(tokenizer: Tokenizer) -> TokenBytes:
    """The one TokenBytes of `tokenizer`. ModelLoadError if its decoder is of neither family."""
    return TokenBytes(tokenizer)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    decoder = tokenizer.decoder
    if decoder is None:
        raise ModelLoadError(
            "tokenizer.json has no decoder, so tokens cannot be turned into text; add one to it"
        )
    spec = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    if all(step["type"] in _BYTE_LEVEL_STEPS for step in steps) or all(map(_is_sentencepiece_step, steps)):
        return steps
    raise ModelLoadError(
        f"tokenizer.json has the decoder {spec}; only ByteLevel and SentencePiece decoders are supported"
    )


def _is_sentencepiece_step(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": _WORD_START} and step["content"] == " ")
    return step["type"] in _SENTENCEPIECE_STEPS


def _drops_first_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step["prepend_scheme"] != "never")
    return bool(step["type"] == "Strip" and step["content"] == " " and step["start"] > 0)


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: printable Latin-1 is itself, the rest follows from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


def _byte_level(piece: str) -> bytes:
    """A piece with any other character is an added token, which stands for itself."""
    table = _byte_of_char()
    try:
        return bytes(table[char] for char in piece)
    except KeyError:
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(_WORD_START, " ").encode()
