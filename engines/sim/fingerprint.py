"""A number for every prefix of a sequence: all that the simulated model knows of the tokens so far (sans-IO)."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import accumulate

MULTIPLIER = 6364136223846793005  # Knuth's, of his linear congruential generator modulo 2^64
MASK = (1 << 64) - 1
EMPTY = 0x9E3779B97F4A7C15  # the fingerprint of no tokens: anything but 0


def extend(fingerprints: list[int], token_ids: Sequence[int]) -> None:
    """Append the fingerprints of the prefixes that end with each of `token_ids`."""
    following = accumulate(token_ids, _append, initial=fingerprints[-1] if fingerprints else EMPTY)
    next(following)
    fingerprints.extend(following)


def choose_token(fingerprint: int, vocab_size: int, banned_ids: Set[int]) -> int:
    """The token behind the prefix with this fingerprint, none of `banned_ids`."""
    assert len(banned_ids) < vocab_size, f"all {vocab_size} tokens are banned"
    token_id = (fingerprint >> 24) % vocab_size  # low bits of such a generator repeat soon
    while token_id in banned_ids:
        token_id = (token_id + 1) % vocab_size
    return token_id


def _append(fingerprint: int, token_id: int) -> int:
    return (fingerprint * MULTIPLIER + token_id + 1) & MASK
