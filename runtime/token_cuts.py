"""Where a text can be cut so that its parts are tokenized as they are within it: at control tokens, between words.

A tokenizer first looks for added tokens, from left to right. What is between them it normalizes, cuts into
pre-tokens and tokenizes, each of them by itself. So a text's ids are those of its parts, one behind the other, if the
cuts are before or behind control tokens that take nothing of the text around them, or between two pre-tokens. This is
known of byte-level BPE alone; of other tokenizers `cuts_of` says that they cannot be cut.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import msgspec
from tokenizers import Tokenizer

Cut = Callable[[str], list[str]]

# pre-tokenizers that see no further than from one control token to the next
_LOCAL_STEPS = {"ByteLevel", "Digits", "Split"}
# normalizers that change no ASCII text
_OF_OTHER_TEXT = {"NFC", "NFD", "NFKC", "NFKD"}

# Pre-tokens of ASCII text end behind the last letter of a row: no expression for them goes on from letters to anything
# else. They end before a space with a letter behind it: a match has a space as its first character, or in a run of
# white space, which leaves its last space to the letter. All expressions look ahead only, and only whether there is
# more white space or none; to them the end of a word is as that space.
_WORD = re.compile(r" ?[A-Za-z]+|[^A-Za-z]+?(?= [A-Za-z])|[^A-Za-z]+[A-Za-z]*")
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace("{1,3}", "")


class Cuts(msgspec.Struct, frozen=True):
    """What cuts a text into parts, of which some may be empty. None: it cannot be cut so."""

    at_control_tokens: Cut | None = None  # before and behind each
    between_words: Cut | None = None  # for ASCII text without control tokens


def cuts_of(tokenizer: Tokenizer) -> Cuts:
    spec = json.loads(tokenizer.to_str())
    added = spec["added_tokens"]
    if not (_is_local(spec) and all(map(_stands_alone, added))):
        return Cuts()
    # Where several fit, the tokenizer takes the longest. Those that it looks for in normalized text come later.
    names = sorted((token["content"] for token in added if not token["normalized"]), key=len, reverse=True)
    if not names:
        return Cuts()
    at_names = re.compile(f"({'|'.join(map(re.escape, names))})").split
    return Cuts(at_names, _WORD.findall if _has_words(spec) else None)


def _is_local(spec: dict[str, Any]) -> bool:
    kinds = {step["type"] for step in _steps(spec, "pre_tokenizer", "pretokenizers")}
    model = spec["model"]
    return model["type"] == "BPE" and not model.get("dropout") and set() < kinds <= _LOCAL_STEPS


def _stands_alone(added: dict[str, Any]) -> bool:
    return not (added["lstrip"] or added["rstrip"] or added["single_word"])


def _has_words(spec: dict[str, Any]) -> bool:
    """Whether pre-tokens of ASCII text end between words, and nothing looks at more than one of them."""
    steps = _steps(spec, "pre_tokenizer", "pretokenizers")
    return (
        any(map(_ends_words, steps))
        and all(step["type"] != "Split" or _ends_words(step) for step in steps)
        and not any(step.get("add_prefix_space") for step in steps)
        and all(map(_keeps_ascii, _steps(spec, "normalizer", "normalizers")))
        and not any(token["normalized"] for token in spec["added_tokens"])
    )


def _ends_words(step: dict[str, Any]) -> bool:
    if step["type"] == "Split":
        is_whole = step["behavior"] == "Isolated" and not step["invert"]
        return is_whole and step["pattern"].get("Regex") in (_LLAMA_3, _QWEN_2)
    return step["type"] == "ByteLevel" and bool(step["use_regex"])  # GPT-2's expression


def _keeps_ascii(step: dict[str, Any]) -> bool:
    if step["type"] == "Replace":
        return not step["pattern"].get("String", "").isascii()
    return step["type"] in _OF_OTHER_TEXT


def _steps(spec: dict[str, Any], kind: str, parts: str) -> list[dict[str, Any]]:
    """Those of a sequence, the one that there is, or none."""
    step = spec[kind]
    return [] if step is None else step.get(parts, [step])
