"""Which KV slots a step looks at: all that are new to the sequence, and samples of the rest."""

from __future__ import annotations

import ctypes

from virtual_engine import BLOCK_SIZE, make_request

from dynrt.engines.scheduling.batch import Chunk
from dynrt.engines.scheduling.sequence import Sequence
from dynrt.engines.sim.contents import Contents
from dynrt.engines.sim.kv_store import KvStore

TOKENS = [10 + (7 * i * i) % 280 for i in range(12)]


def chunk(start: int, end: int, block_ids: list[int]) -> Chunk:
    return Chunk(TOKENS[start:end], start, block_ids, None)


def test_what_was_never_read_is_looked_at_whole() -> None:
    contents, sequence = Contents(BLOCK_SIZE), Sequence.of(make_request(1, TOKENS))
    assert contents.read_by(sequence, chunk(8, 11, [6, 4, 9])).positions == [*range(8)]


def test_what_the_sequence_wrote_itself_is_sampled() -> None:
    contents, sequence = Contents(BLOCK_SIZE), Sequence.of(make_request(1, TOKENS))
    assert contents.read_by(sequence, chunk(0, 8, [6, 4, 9])).positions == []
    assert len(contents.read_by(sequence, chunk(8, 12, [6, 4, 9])).positions) == 1


def test_what_moved_is_looked_at_from_there_on() -> None:
    """A block computed twice is exchanged for the cached one; a preempted sequence gets other blocks."""
    contents, sequence = Contents(BLOCK_SIZE), Sequence.of(make_request(1, TOKENS))
    contents.read_by(sequence, chunk(0, 8, [6, 4, 9]))
    read = contents.read_by(sequence, chunk(8, 11, [6, 5, 9]))
    assert read.positions[1:] == [4, 5, 6, 7] and read.positions[0] < 4
    assert read.block_ids[1:] == [5] * 4


def test_samples_of_a_long_sequence_are_spread_over_it() -> None:
    token_ids = [1] * 20_000
    contents, sequence = Contents(BLOCK_SIZE), Sequence.of(make_request(1, token_ids))
    block_ids = [*range(5000)]
    contents.read_by(sequence, Chunk(token_ids[:19_000], 0, block_ids, None))
    samples = {
        position
        for start in range(19_000, 20_000)
        for position in contents.read_by(sequence, Chunk([1], start, block_ids, None)).positions
    }
    assert len(samples) > 900
    assert {position // 1000 for position in samples} >= {*range(19)}


def test_a_store_tells_every_wrong_slot_and_its_first_wrong_layer() -> None:
    contents, sequence = Contents(BLOCK_SIZE), Sequence.of(make_request(1, TOKENS))
    store, other = (KvStore(num_layers=3, num_blocks=10, block_size=BLOCK_SIZE) for _ in range(2))
    slots = contents.written_by(sequence, chunk(0, 12, [6, 4, 9]))
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
    store.write(contents.written_by(sequence, chunk(0, 12, [0, 1, 2])), 0, 3)
    words = [
        word
        for region in store.regions()
        for word in (ctypes.c_uint32 * (region.num_bytes // 4)).from_address(region.address)
    ]
    assert len(set(words)) == len(words) == 3 * 2 * 12
