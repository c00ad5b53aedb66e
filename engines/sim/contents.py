"""What the KV of every sequence must be, and how much of it has been looked at since it came to lie where it does."""

from __future__ import annotations

from itertools import chain
from zlib import crc32

import msgspec

from dynrt.engines.scheduling.batch import Chunk
from dynrt.engines.scheduling.scheduler import Batch
from dynrt.engines.scheduling.sequence import RequestId, Sequence
from dynrt.engines.sim import fingerprint
from dynrt.engines.sim.kv_store import Slots

Positions = list[int] | range

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

    def written_by(self, batch: Batch) -> Slots:
        """The slots that this step fills."""
        return self._slots(batch, [range(chunk.start, chunk.end) for chunk in batch.chunks])

    def read_by(self, batch: Batch) -> tuple[Slots, list[RequestId]]:
        """The slots to be looked at and whose they are: what a sequence reads for the first time, and one more."""
        positions: list[Positions] = [*map(self._look_at, batch.sequences, batch.chunks)]
        owners = [sequence.id for sequence, own in zip(batch.sequences, positions, strict=True) for _ in own]
        return self._slots(batch, positions), owners

    def _look_at(self, sequence: Sequence, chunk: Chunk) -> list[int]:
        content = self._followed(sequence)
        first = min(content.num_seen, chunk.start, self._first_moved(content, chunk.block_ids))
        content.block_ids, content.num_seen = chunk.block_ids, chunk.end
        again = [chunk.end * _SCATTER % (1 << 32) % first] if first else []
        return [*again, *range(first, chunk.start)]

    def _first_moved(self, content: _Content, block_ids: list[int]) -> int:
        """The first token that lies in another block than before; the number of tokens if none does."""
        before = content.block_ids
        if block_ids[: len(before)] == before:  # nearly always, and many times faster than what follows
            return len(before) * self._block_size
        moved = (
            index for index, pair in enumerate(zip(before, block_ids, strict=False)) if pair[0] != pair[1]
        )
        return next(moved, len(block_ids)) * self._block_size

    def _slots(self, batch: Batch, positions: list[Positions]) -> Slots:
        """Of these positions of each sequence."""
        block_ids: list[int] = []
        fingerprints: list[int] = []
        for sequence, chunk, own in zip(batch.sequences, batch.chunks, positions, strict=True):
            known, salt_key = self._followed(sequence).fingerprints, crc32(sequence.salt.encode())
            block_ids += [chunk.block_ids[position // self._block_size] for position in own]
            fingerprints += [known[position] ^ salt_key for position in own]
        return Slots.of(block_ids, [*chain.from_iterable(positions)], fingerprints)

    def _followed(self, sequence: Sequence) -> _Content:
        """Up to the sequence's last known token."""
        content = self._by_id.setdefault(sequence.id, _Content())
        num_known = len(content.fingerprints)
        if num_known < len(sequence.token_ids):
            fingerprint.extend(content.fingerprints, sequence.token_ids[num_known:])
        return content
