"""Mapping one worker's KV onto another's: every byte of a prompt once, and which workers cannot be mapped."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynrt.transfer.agent import NixlError
from dynrt.transfer.cells import MAX_CELLS, cell_indices, cell_rows
from dynrt.transfer.layout import KvGeometry, Mismatch
from dynrt.transfer.mapping import KvMapping, Slice, map_kv, pieces_of
from dynrt.transfer.units import UnitRange

NATIVE, HEADS_FIRST = "block,kv,token,head,dim", "block,kv,head,token,dim"
PACKED = "block,head,kv,packed"  # vLLM on CPUs: K and V of a head, each in an order of its own


def worker(num_ranks: int, num_heads: int, **changes: Any) -> list[KvGeometry]:
    """Heads shared out as evenly as they go; with more ranks than heads, neighbours hold the same one."""
    bounds = [rank * num_heads // num_ranks for rank in range(num_ranks + 1)]
    shape = {
        "num_layers": 2,
        "num_blocks": 7,
        "block_size": 4,
        "head_size": 3,
        "dtype": "float16",
        **changes,
    }
    return [
        KvGeometry(num_kv_heads=max(1, end - first), first_head=first, total_kv_heads=num_heads, **shape)
        for first, end in pairwise(bounds)
    ]


def mapped(source: list[KvGeometry], target: list[KvGeometry]) -> KvMapping:
    mapping = map_kv(source, target)
    assert isinstance(mapping, KvMapping), mapping
    return mapping


def test_alike_workers_move_whole_blocks_k_and_v_together() -> None:
    mapping = mapped(worker(2, 4), worker(2, 4))
    for rank, route in enumerate(mapping.routes):
        assert (route.source, route.target) == (route.target, route.source)
        assert route.source.rank == rank and route.source.cell_offsets == (0,)
        assert route.piece_bytes == route.source.block_bytes == worker(2, 4)[rank].layer_block_bytes


def test_a_rank_with_more_heads_is_cut_by_heads() -> None:
    mapping = mapped(worker(1, 4, order=HEADS_FIRST), worker(2, 4, order=HEADS_FIRST))
    head_bytes = 4 * 3 * 2
    assert [route.source.cell_offsets for route in mapping.routes] == [
        (0, 4 * head_bytes),  # heads 0 and 1 of K, then of V
        (2 * head_bytes, 6 * head_bytes),
    ]
    assert [route.target.rank for route in mapping.routes] == [0, 1]


@pytest.mark.parametrize("order", [NATIVE, HEADS_FIRST, PACKED])
def test_a_head_held_by_several_ranks_comes_from_one_and_reaches_all(order: str) -> None:
    two_to_four = mapped(worker(2, 2, order=order), worker(4, 2, order=order))
    assert [(route.source.rank, route.target.rank) for route in two_to_four.routes] == [
        (0, 0),
        (0, 1),
        (1, 2),
        (1, 3),
    ]
    four_to_four = mapped(worker(4, 2, order=order), worker(4, 2, order=order))
    assert [(route.source.rank, route.target.rank) for route in four_to_four.routes] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 3),
    ]
    four_to_one = mapped(worker(4, 2, order=order), worker(1, 2, order=order))
    assert [route.source.rank for route in four_to_one.routes] == [0, 2]


def test_orders_that_describe_the_same_bytes_are_alike() -> None:
    mapping = mapped(worker(4, 4, order=HEADS_FIRST), worker(2, 4, order=NATIVE))
    assert all(route.source.cell_bytes == 3 * 2 for route in mapping.routes)  # a head's values of one token
    assert isinstance(map_kv(worker(2, 4, order=HEADS_FIRST), worker(2, 4, order=NATIVE)), Mismatch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 3}, "num_layers is 2 on prefill and 3 on decode"),
        ({"head_size": 4}, "head_size is 3 on prefill and 4 on decode"),
        ({"dtype": "bfloat16"}, "dtype is 'float16' on prefill and 'bfloat16' on decode"),
        ({"block_size": 6}, "block_size is 4 on prefill and 6 on decode"),
        ({"order": HEADS_FIRST}, f"order is '{NATIVE}' on prefill and '{HEADS_FIRST}' on decode"),
        ({"order": PACKED}, f"order is '{NATIVE}' on prefill and '{PACKED}' on decode"),
    ],
)
def test_a_mismatch_names_the_field_and_both_values(changes: dict[str, Any], message: str) -> None:
    assert str(map_kv(worker(1, 2), worker(1, 2, **changes))) == message


def test_heads_of_the_model_must_agree_and_all_be_there() -> None:
    assert str(map_kv(worker(1, 2), worker(1, 4))) == "model_kv_heads is 2 on prefill and 4 on decode"
    first_half = worker(2, 4)[:1]
    assert str(map_kv(first_half, worker(1, 4))) == (
        "KV heads held is [0, 1] on prefill and [0, 1, 2, 3] on decode"
    )


def test_ranks_with_different_layers_are_refused() -> None:
    """Pipeline parallelism."""
    stages = [worker(1, 2)[0], worker(1, 2, num_layers=1)[0]]
    assert isinstance(map_kv(stages, worker(1, 2)), Mismatch)


def test_packed_tokens_move_in_whole_blocks_only() -> None:
    assert isinstance(map_kv(worker(1, 2, order=PACKED), worker(1, 2, order=PACKED, block_size=8)), Mismatch)
    (route,) = mapped(worker(1, 2, order=PACKED), worker(1, 2, order=PACKED)).routes
    assert route.source.cell_offsets == (0,)


def test_bytes_of_an_unknown_order_move_between_ranks_of_the_same_heads_only() -> None:
    assert len(mapped(worker(2, 4, order="block,own"), worker(2, 4, order="block,own")).routes) == 2
    refused = map_kv(worker(2, 4, order="block,own"), worker(1, 4, order="block,own"))
    assert str(refused) == "num_kv_heads is 2 on prefill and 4 on decode"
    assert isinstance(map_kv(worker(1, 1, order="block,own"), worker(1, 1, order="block,other")), Mismatch)


@pytest.mark.parametrize("order", ["kv,block,token,head,dim", "block,kv,token,head", "block,kv,kv,dim", ""])
def test_an_order_must_name_every_axis_once(order: str) -> None:
    with pytest.raises(ValueError, match="is not block and then each of"):
        worker(1, 1, order=order)


def test_a_rank_cannot_hold_heads_that_the_model_has_not() -> None:
    with pytest.raises(ValueError, match="heads 1 … 2 of 2"):
        KvGeometry(1, 1, 1, 2, 1, "float16", first_head=1, total_kv_heads=2)


# --- every byte once ------------------------------------------------------------------------------

shapes = st.fixed_dictionaries(
    {
        "num_heads": st.integers(1, 4),
        "order": st.sampled_from([NATIVE, HEADS_FIRST]),
        "source_ranks": st.integers(1, 5),
        "target_ranks": st.integers(1, 5),
        "source_block": st.sampled_from([1, 2, 4, 8]),
        "target_block": st.sampled_from([1, 2, 4, 8]),
        "num_tokens": st.integers(1, 30),
    }
)


def values_of(
    geometry: KvGeometry, blocks: list[int], num_tokens: int
) -> dict[int, tuple[int, int, int, int]]:
    """Where a prompt's values lie in a layer's region by the definition of the orders: (kv, position, head, dim)."""
    sizes = geometry.block_size, geometry.num_kv_heads, geometry.head_size
    found = {}
    for kv, position, head, dim in product(range(2), range(num_tokens), range(sizes[1]), range(sizes[2])):
        index = {"block": blocks[position // sizes[0]], "kv": kv, "token": position % sizes[0], "head": head}
        offset = 0
        for axis, size in zip(
            geometry.order.split(","),
            (1, 2, *(sizes[:2] if geometry.order == NATIVE else sizes[1::-1])),
            strict=False,
        ):
            offset = offset * size + index.get(axis, 0)
        found[2 * (offset * sizes[2] + dim)] = kv, position, geometry.first_head + head, dim
    return found


@given(shapes, st.data())
def test_every_byte_of_a_prompt_is_written_once_and_is_the_right_one(
    shape: dict[str, Any], data: st.DataObject
) -> None:
    order, num_tokens = shape["order"], shape["num_tokens"]
    source = worker(
        shape["source_ranks"],
        shape["num_heads"],
        block_size=shape["source_block"],
        order=order,
        num_blocks=40,
    )
    target = worker(
        shape["target_ranks"],
        shape["num_heads"],
        block_size=shape["target_block"],
        order=order,
        num_blocks=40,
    )
    mapping = mapped(source, target)
    source_blocks, target_blocks = (
        data.draw(st.permutations(range(40)))[: -(-num_tokens // rank.block_size)]
        for rank in (source[0], target[0])
    )
    count = mapping.num_pieces(num_tokens)
    source_pieces = pieces_of(source_blocks, mapping.source_pieces_per_block)[:count]
    target_pieces = pieces_of(target_blocks, mapping.target_pieces_per_block)[:count]
    assert len(source_pieces) == len(target_pieces) == count
    read = [values_of(rank, source_blocks, num_tokens) for rank in source]
    wanted = [values_of(rank, target_blocks, num_tokens) for rank in target]
    written: Counter[tuple[int, int]] = Counter()
    for route in mapping.routes:
        for ours, theirs in zip(source_pieces, target_pieces, strict=True):
            for begin, end in zip(route.source.cells(ours), route.target.cells(theirs), strict=True):
                for offset in range(0, route.source.cell_bytes, 2):
                    written[route.target.rank, end + offset] += 1
                    value = read[route.source.rank].get(begin + offset)
                    assert wanted[route.target.rank].get(end + offset) == value
    assert set(written.values()) == {1}
    prompt = {(rank, offset) for rank, values in enumerate(wanted) for offset in values}
    assert prompt <= set(written)
    blocks = [(rank, offset // target[rank].layer_block_bytes) for rank, offset in written]
    assert {block for _, block in blocks} <= set(target_blocks)


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [2**63 - 10_000, 2**63, 2**64 - 20_000])
def test_addresses_near_the_end_of_their_range_are_exact(base: int) -> None:
    (route, *_) = mapped(worker(1, 2), worker(2, 2, block_size=8)).routes
    cells = route.target
    rows = cell_rows([base, base + 5000], cells, device=0)
    units = UnitRange(0, 1, 1, 0, 2)
    num_blocks = cells.num_blocks
    for index, piece in zip(cell_indices(cells, units, [3, 12]).reshape(2, -1), [3, 12], strict=True):
        found = [int(rows[i // num_blocks][0]) + int(i % num_blocks) * cells.block_bytes for i in index]
        assert found == [base + 5000 + offset for offset in cells.cells(piece)]
    assert rows.dtype == np.uint64


def test_more_cells_than_nixl_can_number_are_refused() -> None:
    cells = Slice(0, MAX_CELLS // 2, 8, 1, 8, 4, (0, 4))
    assert len(cell_rows([0], cells, device=0)) == 2
    with pytest.raises(NixlError, match="NIXL counts up to"):
        cell_rows([0, 1], cells, device=0)
