"""What the KV of every sequence must be, and how much of it has been looked at since it came to lie where it does."""

from __future__ import annotations

from zlib import crc32

import msgspec

from dynrt.engines.scheduling.batch import Chunk
from dynrt.engines.scheduling.sequence import RequestId, Sequence
from dynrt.engines.sim import fingerprint
from dynrt.engines.sim.kv_store import Slots

_SCATTER = 2654435761  # Knuth's multiplicative hash: what is looked at again is spread over the sequence


class _Content(msgspec.Struct):
    """One sequence. The first `num_seen` tokens were found right, or written, in these blocks."""

    fingerprints: list[int] = []
    block_ids: list[int] = []
    num_seen: int = 0


class Contents:
    """By request. A request that is forgotten too early is only looked at anew."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._by_id: dict[RequestId, _Content] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def forget(self, request_id: RequestId) -> None:
        self._by_id.pop(request_id, None)

    def fingerprint_of(self, sequence: Sequence) -> int:
        """Of all its known tokens."""
        return self._followed(sequence).fingerprints[-1]

    def written_by(self, sequence: Sequence, chunk: Chunk) -> Slots:
        """The slots that this chunk fills."""
        return self._slots(sequence, chunk, [*range(chunk.start, chunk.end)])

    def read_by(self, sequence: Sequence, chunk: Chunk) -> Slots:
        """The slots to be looked at: those that this sequence reads for the first time, and one more."""
        content = self._followed(sequence)
        first = min(content.num_seen, chunk.start, self._first_moved(content, chunk.block_ids))
        content.block_ids, content.num_seen = chunk.block_ids, chunk.end
        again = [chunk.end * _SCATTER % (1 << 32) % first] if first else []
        return self._slots(sequence, chunk, [*again, *range(first, chunk.start)])

    def _first_moved(self, content: _Content, block_ids: list[int]) -> int:
        """The first token that lies in another block than before; the number of tokens if none does."""
        before = content.block_ids
        if block_ids[: len(before)] == before:
            return len(before) * self._block_size
        pairs = enumerate(zip(before, block_ids, strict=False))
        index = next((index for index, (old, new) in pairs if old != new), min(len(before), len(block_ids)))
        return index * self._block_size

    def _slots(self, sequence: Sequence, chunk: Chunk, positions: list[int]) -> Slots:
        fingerprints, size = self._followed(sequence).fingerprints, self._block_size
        salt_key = crc32(sequence.salt.encode())
        return Slots(
            block_ids=[chunk.block_ids[position // size] for position in positions],
            positions=positions,
            fingerprints=[fingerprints[position] ^ salt_key for position in positions],
        )

    def _followed(self, sequence: Sequence) -> _Content:
        """Up to the sequence's last known token."""
        content = self._by_id.setdefault(sequence.id, _Content())
        num_known = len(content.fingerprints)
        if num_known < len(sequence.token_ids):
            fingerprint.extend(content.fingerprints, sequence.token_ids[num_known:])
        return content
