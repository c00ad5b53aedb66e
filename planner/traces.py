"""Request traces of others, and prompts made up for them that share what the trace says they share (sans-IO but files).

Mooncake (FAST'25, https://github.com/kvcache-ai/Mooncake), JSON lines: `timestamp` (ms), `input_length`,
`output_length` (tokens) and `hash_ids`, one id for each 512 tokens of the prompt, the last and partial one included.
Equal ids stand for equal tokens behind equal prefixes.
Azure (https://github.com/Azure/AzurePublicDataset), CSV: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`; nothing is
known of the prompts, so no two of them share anything.
"""

from __future__ import annotations

import csv
import hashlib
import itertools
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from random import Random

import msgspec

BLOCK_TOKENS = 512  # of Mooncake's traces
CONVERSATION_TICK_S = 3.0  # Mooncake's conversation trace has no finer time of arrival
TOKEN_BYTES = 4
VOCAB_SIZE = 256  # of made-up tokens
CACHED_BLOCKS = 50_000  # of made-up tokens: 100 MB with blocks of 512

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


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


def read_trace(path: Path) -> list[TraceRequest]:
    """A file in either format, told apart by how it begins. Raises ValueError for neither, and OSError."""
    with path.open("rb") as file:
        beginning = file.read(64)
    if beginning.startswith(b"{"):
        return read_mooncake(path)
    if beginning.startswith(",".join(_AZURE_COLUMNS).encode()):
        return read_azure(path)
    raise ValueError(
        f"it begins with {beginning[:24]!r}; a trace is JSON lines of Mooncake's form "
        f'({{"timestamp": …, "input_length": …, …}}) or CSV of Azure\'s ({",".join(_AZURE_COLUMNS)})'
    )


def read_mooncake(path: Path) -> list[TraceRequest]:
    """All requests of a file. Raises ValueError, with the line's number, for a broken line."""
    decoder = msgspec.json.Decoder(_Line)
    with path.open("rb") as lines:
        return [_request(number, text, decoder) for number, text in enumerate(lines)]


def read_azure(path: Path) -> list[TraceRequest]:
    """All requests of a file. Raises ValueError, with the line's number, for a broken line."""
    requests: list[TraceRequest] = []
    first_at: datetime | None = None
    first_block = 0
    with path.open(newline="", encoding="utf-8") as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            arrived_at, prompt_tokens, output_tokens = _read_row(number + 2, row)
            first_at = first_at or arrived_at
            num_blocks = -(-prompt_tokens // BLOCK_TOKENS)
            block_ids = [*range(first_block, first_block + num_blocks)]
            first_block += num_blocks
            arrival_s = (arrived_at - first_at).total_seconds()
            requests.append(TraceRequest(number, arrival_s, prompt_tokens, output_tokens, block_ids))
    return requests


def has_ticks(requests: Sequence[TraceRequest]) -> bool:
    """Whether most requests share their time of arrival with another: the clock that wrote the trace was coarse."""
    return 2 * len({request.arrival_s for request in requests}) < len(requests)


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


def block_token_ids(block_ids: Iterable[int], block_tokens: int) -> bytes:
    """Each block's made-up token ids below VOCAB_SIZE, always the same for the same id, packed as uint32."""
    return b"".join([_token_ids(block_id, block_tokens) for block_id in block_ids])


@lru_cache(maxsize=CACHED_BLOCKS)
def _token_ids(block_id: int, block_tokens: int) -> bytes:
    packed = bytearray(block_tokens * TOKEN_BYTES)
    packed[::TOKEN_BYTES] = hashlib.shake_128(block_id.to_bytes(8, "little")).digest(block_tokens)
    return bytes(packed)


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


def _read_row(line: int, row: dict[str, str]) -> tuple[datetime, int, int]:
    try:
        stamp, prompt_tokens, output_tokens = (row[column] for column in _AZURE_COLUMNS)
        # Seven digits of a second, of which Python takes six.
        found = datetime.fromisoformat(stamp[:26]), int(prompt_tokens), int(output_tokens)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"line {line}: {error}; expected {','.join(_AZURE_COLUMNS)}") from error
    if found[1] < 1:
        raise ValueError(f"line {line}: {found[1]} prompt tokens; must be at least 1")
    return found
