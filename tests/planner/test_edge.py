"""An edge counts, block by block, how often each holder has it, whatever was held and dropped together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dynrt.planner.edge import Edge

LENGTH = 6
HOLDERS = (1, 2)

changes = st.lists(st.tuples(st.booleans(), st.sampled_from(HOLDERS), st.integers(1, (1 << LENGTH) - 1)))


def blocks_of(counts: list[int]) -> int:
    return sum(1 << place for place, count in enumerate(counts) if count)


@given(changes)
def test_holdings_are_counted_by_block(drawn: list[tuple[bool, int, int]]) -> None:
    edge = Edge(None, 0, bytes(4 * LENGTH), LENGTH)
    counts = {holder: [0] * LENGTH for holder in HOLDERS}
    num_records = 0
    for is_held, holder, blocks in drawn:
        if not is_held:
            blocks &= blocks_of(counts[holder])  # only what is held is ever dropped
        num_records += edge.hold(holder, blocks) if is_held else edge.drop(holder, blocks)
        for place in range(LENGTH):
            counts[holder][place] += (1 if is_held else -1) * (blocks >> place & 1)
        assert [edge.held_by(each) for each in HOLDERS] == [blocks_of(counts[each]) for each in HOLDERS]
        assert (
            edge.num_records
            == num_records
            == len(edge.partial or {}) + sum(map(len, (edge.repeats or {}).values()))
        )


def test_what_was_held_together_and_is_dropped_together_takes_one_record_however_often() -> None:
    edge = Edge(None, 0, bytes(4 * LENGTH), LENGTH)
    whole = (1 << LENGTH) - 1
    for _ in range(1000):
        edge.hold(1, whole)
    assert edge.num_records == 1
    for _ in range(1000):
        assert edge.held_by(1) == whole
        edge.drop(1, whole)
    assert (edge.held_by(1), edge.num_records) == (0, 0)
