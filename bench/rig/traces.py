"""Request traces in Mooncake's format, and prompts whose shared prefixes are those of the trace.

A line has `timestamp` (ms), `input_length`, `output_length` (tokens) and `hash_ids`: one id for each 512 tokens of
the prompt, the last and partial one included. Equal ids stand for equal tokens behind equal prefixes
(Mooncake, FAST'25, https://github.com/kvcache-ai/Mooncake).
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from random import Random

import msgspec

BLOCK_TOKENS = 512  # of Mooncake's traces
CONVERSATION_TICK_S = 3.0  # Mooncake's conversation trace has no finer time of arrival
TOKEN_BYTES = 4
CACHED_BLOCKS = 50_000  # of made-up tokens: 100 MB with blocks of 512


class TraceRequest(msgspec.Struct, frozen=True):
    """One request: `block_ids` has ceil(prompt_tokens / block_tokens) entries, the last may be partial."""

    number: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: list[int]
    block_tokens: int = BLOCK_TOKENS

    @property
    def full_blocks(self) -> list[int]:
        """The blocks that a cache can keep."""
        return self.block_ids[: self.prompt_tokens // self.block_tokens]

    @property
    def usable_blocks(self) -> int:
        """How many blocks it can take from a cache: the last token is always computed."""
        return (self.prompt_tokens - 1) // self.block_tokens

    def prompt_ids(self) -> bytes:
        """Packed little-endian uint32, `prompt_tokens` of them."""
        return block_token_ids(self.block_ids, self.block_tokens)[: self.prompt_tokens * TOKEN_BYTES]


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_mooncake(path: Path) -> list[TraceRequest]:
    """All requests of a file. Raises ValueError, with the line's number, for a broken line."""
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as lines:
        return [_request(number, text, decoder) for number, text in enumerate(lines)]


def spread_arrivals(requests: Sequence[TraceRequest], tick_s: float, random: Random) -> list[TraceRequest]:
    """Requests of one time stamp come at random moments of the tick that it begins, in the trace's order."""
    spread: list[TraceRequest] = []
    for arrival_s, group in itertools.groupby(requests, lambda request: request.arrival_s):
        together = list(group)
        offsets = sorted(random.uniform(0.0, tick_s) for _ in together)
        for request, offset in zip(together, offsets, strict=True):
            spread.append(msgspec.structs.replace(request, arrival_s=arrival_s + offset))
    spread.sort(key=lambda request: request.arrival_s)  # a tick may be a few ms short
    return spread


def compress_arrivals(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests `factor` times as fast."""
    assert factor > 0, factor
    return [msgspec.structs.replace(request, arrival_s=request.arrival_s / factor) for request in requests]


def block_token_ids(block_ids: Sequence[int], block_tokens: int) -> bytes:
    """Each block's made-up token ids, always the same for the same id, packed as uint32."""
    return b"".join([_token_ids(block_id, block_tokens) for block_id in block_ids])


@lru_cache(maxsize=CACHED_BLOCKS)
def _token_ids(block_id: int, block_tokens: int) -> bytes:
    return hashlib.shake_128(block_id.to_bytes(8, "little")).digest(block_tokens * TOKEN_BYTES)


def _request(number: int, text: bytes, decoder: msgspec.json.Decoder[_Line]) -> TraceRequest:
    try:
        line = decoder.decode(text)
    except msgspec.DecodeError as error:
        raise ValueError(f"line {number + 1}: {error}") from error
    needed = -(-line.input_length // BLOCK_TOKENS)
    if line.input_length < 1 or len(line.hash_ids) != needed:
        raise ValueError(
            f"line {number + 1}: {line.input_length} tokens with {len(line.hash_ids)} hash_ids; "
            f"must be at least 1 token, and {needed} ids of {BLOCK_TOKENS} tokens each"
        )
    return TraceRequest(number, line.timestamp / 1e3, line.input_length, line.output_length, line.hash_ids)
