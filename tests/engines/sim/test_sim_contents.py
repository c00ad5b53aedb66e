"""Which KV slots a step looks at: all that are new to the sequence, and samples of the rest."""

from __future__ import annotations

import ctypes

from virtual_engine import BLOCK_SIZE, make_request

from dynrt.engines.scheduling.batch import Chunk
from dynrt.engines.scheduling.scheduler import Batch
from dynrt.engines.scheduling.sequence import Sequence
from dynrt.engines.sim.contents import Contents
from dynrt.engines.sim.kv_store import KvStore

TOKENS = [10 + (7 * i * i) % 280 for i in range(12)]


def one(sequence: Sequence, start: int, end: int, block_ids: list[int]) -> Batch:
    """A step that computes tokens [start, end) of one sequence."""
    return Batch([Chunk(sequence.token_ids[start:end], start, block_ids, None)], [sequence])


def looked_at(contents: Contents, batch: Batch) -> list[tuple[int, int]]:
    """Pairs of a position and the block where it lies."""
    slots, owners = contents.read_by(batch)
    assert owners == [batch.sequences[0].id] * len(slots.positions)
    return [*zip(slots.positions.tolist(), slots.block_ids.tolist(), strict=True)]


def test_what_was_never_read_is_looked_at_whole() -> None:
    contents, sequence = Contents(BLOCK_SIZE), Sequence.of(make_request(1, TOKENS))
    read = looked_at(contents, one(sequence, 8, 11, [6, 4, 9]))
    assert read == [(position, 6) for position in range(4)] + [(position, 4) for position in range(4, 8)]


def test_what_the_sequence_wrote_itself_is_sampled() -> None:
    contents, sequence = Contents(BLOCK_SIZE), Sequence.of(make_request(1, TOKENS))
    assert looked_at(contents, one(sequence, 0, 8, [6, 4, 9])) == []
    assert len(looked_at(contents, one(sequence, 8, 12, [6, 4, 9]))) == 1


def test_what_moved_is_looked_at_from_there_on() -> None:
    """A block computed twice is exchanged for the cached one; a preempted sequence gets other blocks."""
    contents, sequence = Contents(BLOCK_SIZE), Sequence.of(make_request(1, TOKENS))
    looked_at(contents, one(sequence, 0, 8, [6, 4, 9]))
    sample, *moved = looked_at(contents, one(sequence, 8, 11, [6, 5, 9]))
    assert sample[1] == 6
    assert moved == [(position, 5) for position in range(4, 8)]


def test_samples_of_a_long_sequence_are_spread_over_it() -> None:
    contents, sequence = Contents(BLOCK_SIZE), Sequence.of(make_request(1, [1] * 20_000))
    block_ids = [*range(5000)]
    looked_at(contents, one(sequence, 0, 19_000, block_ids))
    samples = {
        position
        for start in range(19_000, 20_000)
        for position, _block in looked_at(contents, one(sequence, start, start + 1, block_ids))
    }
    assert len(samples) > 900
    assert {position // 1000 for position in samples} >= {*range(19)}


def test_a_store_tells_every_wrong_slot_and_its_first_wrong_layer() -> None:
    contents, sequence = Contents(BLOCK_SIZE), Sequence.of(make_request(1, TOKENS))
    store, other = (KvStore(num_layers=3, num_blocks=10, block_size=BLOCK_SIZE) for _ in range(2))
    slots = contents.written_by(one(sequence, 0, 12, [6, 4, 9]))
    store.write(slots, 0, 3)
    assert store.find_wrong(slots) == []
    store.copy_blocks(other, 1, [0], [4])
    store.copy_blocks(other, 2, [0, 0], [4, 9])
    wrong = [(slot.index, slot.layer) for slot in store.find_wrong(slots)]
    assert wrong == [(index, 1) for index in range(4, 8)] + [(index, 2) for index in range(8, 12)]


def test_every_word_is_another() -> None:
    """So that a layer, or K for V, pushed to another's place is seen."""
    contents, sequence = Contents(BLOCK_SIZE), Sequence.of(make_request(1, TOKENS))
    store = KvStore(num_layers=3, num_blocks=3, block_size=BLOCK_SIZE)
    store.write(contents.written_by(one(sequence, 0, 12, [0, 1, 2])), 0, 3)
    words = [
        word
        for region in store.regions()
        for word in (ctypes.c_uint32 * (region.num_bytes // 4)).from_address(region.address)
    ]
    assert len(set(words)) == len(words) == 3 * 2 * 12
