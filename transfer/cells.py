"""The cells of a rank's KV as a list that NIXL prepares once, and where the cells of a write stand in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dynrt.transfer.agent import NixlError
from dynrt.transfer.mapping import Slice
from dynrt.transfer.units import UnitRange

MAX_CELLS = 2**31 - 1  # of a prepared list: NIXL's indices are int32


def cell_rows(addresses: Sequence[int], cells: Slice, device: int) -> npt.NDArray[np.uint64]:
    """NIXL's compressed list of all cells: rows of (address, length, device, stride, count), a count being all blocks.

    Rows are in the order layer, piece of a block, cell. `addresses`: of each layer's region. Raises NixlError.
    """
    rows = [
        (
            address + piece * cells.piece_stride + offset,
            cells.cell_bytes,
            device,
            cells.block_bytes,
            cells.num_blocks,
        )
        for address in addresses
        for piece in range(cells.pieces_per_block)
        for offset in cells.cell_offsets
    ]
    if len(rows) * cells.num_blocks > MAX_CELLS:
        raise NixlError(
            f"{len(rows) * cells.num_blocks} pieces of KV to choose from, NIXL counts up to {MAX_CELLS}"
        )
    return np.array(rows, dtype=np.uint64)


def cell_indices(cells: Slice, units: UnitRange, piece_ids: Sequence[int]) -> npt.NDArray[np.int32]:
    """Where these pieces' cells, in the layers of `units`, stand in a `cell_rows` list; NIXL merges neighbours."""
    num_pieces, num_blocks, num_cells = cells.pieces_per_block, cells.num_blocks, len(cells.cell_offsets)
    first, last = min(piece_ids), max(piece_ids)
    assert first >= 0 and last < num_blocks * num_pieces, f"pieces {first} to {last}"
    ids = np.array(piece_ids, dtype=np.int32)
    layer_rows = num_pieces * num_cells * num_blocks
    begin, end = units.first_layer * layer_rows, (units.first_layer + units.num_layers) * layer_rows
    layers = np.arange(begin, end, layer_rows, dtype=np.int32)
    if num_pieces == num_cells == 1:  # whole blocks: few calls, as this is done for every write
        return np.add.outer(layers, ids).ravel()
    blocks, pieces = np.divmod(ids, np.int32(num_pieces))
    firsts = np.add.outer(layers, pieces * np.int32(num_cells * num_blocks) + blocks)
    return np.add.outer(firsts, np.arange(0, num_cells * num_blocks, num_blocks, dtype=np.int32)).ravel()
