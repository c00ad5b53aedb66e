"""How one worker's KV maps onto another's: who sends which heads to whom, and where these bytes lie on both sides.

A *piece* is the smaller of the two block sizes, in tokens; a block is one piece, or several on the side of the larger
blocks. Piece `i` of block `b` has the id `b * pieces_per_block + i`. A *route* leads from a source rank to a target
rank and carries the heads that this target rank takes from that source rank. What it carries of one piece in one layer
are its *cells*: the longest runs of bytes without a gap on either side. Between alike workers a piece is a block, and
one cell, K and V together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import msgspec

from dynrt.transfer.layout import DTYPE_BYTES, INNER_AXES, KvGeometry, Mismatch

_MUST_MATCH = ("num_layers", "head_size", "dtype", "model_kv_heads")


class Slice(msgspec.Struct, frozen=True):
    """A route's part of one rank's blocks, the same in every layer. Offsets and sizes in bytes."""

    rank: int
    num_blocks: int
    block_bytes: int
    pieces_per_block: int
    piece_stride: int  # from a piece of a block to the block's next one
    cell_bytes: int
    cell_offsets: tuple[int, ...]  # of the cells of a block's first piece, in the block

    @property
    def piece_bytes(self) -> int:
        return len(self.cell_offsets) * self.cell_bytes

    def cells(self, piece_id: int) -> Iterator[int]:
        """Where the cells of that piece begin, counted from the begin of a layer's region."""
        block_id, piece = divmod(piece_id, self.pieces_per_block)
        base = block_id * self.block_bytes + piece * self.piece_stride
        return (base + offset for offset in self.cell_offsets)


class Route(msgspec.Struct, frozen=True):
    """Heads on their way from a source rank to a target rank; cell `i` of a source piece goes to the target's `i`."""

    source: Slice
    target: Slice

    @property
    def piece_bytes(self) -> int:
        """Of one piece in one layer."""
        return self.source.piece_bytes


class KvMapping(msgspec.Struct, frozen=True):
    """All of a source worker's KV onto a target worker's: both ends make the same one of the same geometries."""

    num_layers: int
    piece_tokens: int
    source_pieces_per_block: int
    target_pieces_per_block: int
    routes: tuple[Route, ...]

    def num_pieces(self, num_tokens: int) -> int:
        """That hold a prompt of so many tokens, a partly filled last one included."""
        return -(-num_tokens // self.piece_tokens)


def pieces_of(block_ids: Sequence[int], pieces_per_block: int) -> list[int]:
    """The piece ids of these blocks, in order."""
    if pieces_per_block == 1:
        return list(block_ids)
    return [
        block_id * pieces_per_block + piece for block_id in block_ids for piece in range(pieces_per_block)
    ]


def map_kv(source: Sequence[KvGeometry], target: Sequence[KvGeometry]) -> KvMapping | Mismatch:
    """From a worker's ranks to another's; the first field that stands in the way if that cannot be.

    Each target rank gets each head that it holds from one source rank, so that every byte is written once.
    """
    mismatch = _find_mismatch(source, target)
    if mismatch is not None:
        return mismatch
    heads = [one for rank in range(len(target)) for one in _heads_to(rank, source, target[rank])]
    mismatch = _find_cut_heads(heads, source, target)
    if mismatch is not None:
        return mismatch
    piece_tokens = min(source[0].block_size, target[0].block_size)
    return KvMapping(
        num_layers=source[0].num_layers,
        piece_tokens=piece_tokens,
        source_pieces_per_block=source[0].block_size // piece_tokens,
        target_pieces_per_block=target[0].block_size // piece_tokens,
        routes=tuple(_route(source, target, one, piece_tokens) for one in heads),
    )


# --- what must agree ------------------------------------------------------------------------------


def _find_mismatch(source: Sequence[KvGeometry], target: Sequence[KvGeometry]) -> Mismatch | None:
    for ours, theirs in product(source, target):
        for field in _MUST_MATCH:
            if getattr(ours, field) != getattr(theirs, field):
                return Mismatch(field, getattr(ours, field), getattr(theirs, field))
        found = _find_other_blocks(ours, theirs) or _find_other_order(ours, theirs)
        if found is not None:
            return found
    return _find_unlike_ranks(source, target)


def _find_other_blocks(ours: KvGeometry, theirs: KvGeometry) -> Mismatch | None:
    """One block must be a multiple of the other, and may be cut only if its tokens can be told apart."""
    smaller, larger = sorted((ours.block_size, theirs.block_size))
    is_cut = smaller != larger
    if larger % smaller or (is_cut and not (ours.tells_apart("token") and theirs.tells_apart("token"))):
        return Mismatch("block_size", ours.block_size, theirs.block_size)
    return None


def _find_other_order(ours: KvGeometry, theirs: KvGeometry) -> Mismatch | None:
    """Orders are alike if they name the axes that matter in the same order; an axis of size 1 does not matter."""
    if ours.order == theirs.order:
        return None
    mine, other = ([axis for axis, size in rank.axes() if size > 1] for rank in (ours, theirs))
    is_known = set(mine) | set(other) <= set(INNER_AXES)
    if is_known and [axis for axis in mine if axis in other] == [axis for axis in other if axis in mine]:
        return None
    return Mismatch("order", ours.order, theirs.order)


def _find_unlike_ranks(source: Sequence[KvGeometry], target: Sequence[KvGeometry]) -> Mismatch | None:
    """Each worker's ranks must have blocks of one size, and hold all heads between them."""
    sizes, other_sizes = ([rank.block_size for rank in ranks] for ranks in (source, target))
    if len(set(sizes)) > 1 or len(set(other_sizes)) > 1:
        return Mismatch("block_size", sizes, other_sizes)
    held, wanted = (sorted({head for rank in ranks for head in rank.heads()}) for ranks in (source, target))
    if held == wanted == [*range(source[0].model_kv_heads)]:
        return None
    return Mismatch("KV heads held", held, wanted)


def _find_cut_heads(
    heads: Sequence[_Heads], source: Sequence[KvGeometry], target: Sequence[KvGeometry]
) -> Mismatch | None:
    """Ranks whose heads cannot be told apart must send and receive all that they hold."""
    for one in heads:
        ours, theirs = source[one.source_rank], target[one.target_rank]
        if one.count == ours.num_kv_heads == theirs.num_kv_heads:
            continue
        if not (ours.tells_apart("head") and theirs.tells_apart("head")):
            return Mismatch("num_kv_heads", ours.num_kv_heads, theirs.num_kv_heads)
    return None


# --- routes ---------------------------------------------------------------------------------------


class _Heads(msgspec.Struct, frozen=True):
    """Neighbouring heads of the model, and between which ranks they travel."""

    source_rank: int
    target_rank: int
    first: int
    count: int


def _heads_to(rank: int, source: Sequence[KvGeometry], target: KvGeometry) -> Iterator[_Heads]:
    """In as few runs as there are source ranks; target ranks that hold the same heads draw on different sources."""
    head, end = target.first_head, target.first_head + target.num_kv_heads
    while head < end:
        holders = [index for index, holder in enumerate(source) if head in holder.heads()]
        chosen = holders[rank % len(holders)]
        run_end = min(end, source[chosen].heads().stop)
        yield _Heads(chosen, rank, head, run_end - head)
        head = run_end


class _Walk(msgspec.Struct, frozen=True):
    """One axis of a route's piece: how many steps, and the bytes of a step on each side."""

    count: int
    source_stride: int
    target_stride: int


def _route(
    source: Sequence[KvGeometry], target: Sequence[KvGeometry], heads: _Heads, piece_tokens: int
) -> Route:
    ours, theirs = source[heads.source_rank], target[heads.target_rank]
    mine, other = _strides(ours), _strides(theirs)
    counts = {"token": piece_tokens, "head": heads.count}
    walks = [
        _Walk(min(size, counts.get(axis, size)), mine[axis], other[axis])
        for axis, size in ours.axes()
        if counts.get(axis, size) > 1
    ]
    cell_bytes, loops = _longest_run(walks, DTYPE_BYTES[ours.dtype])
    from_offsets = _offsets([(loop.count, loop.source_stride) for loop in loops])
    to_offsets = _offsets([(loop.count, loop.target_stride) for loop in loops])
    return Route(
        _slice(ours, heads.source_rank, heads.first, piece_tokens, cell_bytes, from_offsets),
        _slice(theirs, heads.target_rank, heads.first, piece_tokens, cell_bytes, to_offsets),
    )


def _strides(geometry: KvGeometry) -> dict[str, int]:
    """Bytes from one index of an axis to the next; 0 for axes that cannot be told apart."""
    strides, stride = dict.fromkeys(INNER_AXES, 0), DTYPE_BYTES[geometry.dtype]
    for axis, size in reversed(geometry.axes()):
        strides[axis] = stride
        stride *= size
    return strides


def _longest_run(walks: Sequence[_Walk], value_bytes: int) -> tuple[int, list[_Walk]]:
    """Bytes without a gap on either side, and the axes to be walked from one such run to the next, outermost first."""
    run, loops = value_bytes, list(walks)
    while loops and loops[-1].source_stride == loops[-1].target_stride == run:
        run *= loops.pop().count
    return run, loops


def _offsets(loops: Sequence[tuple[int, int]]) -> list[int]:
    """`loops`: (count, stride) of each."""
    return [sum(steps) for steps in product(*(range(0, count * stride, stride) for count, stride in loops))]


def _slice(
    geometry: KvGeometry,
    rank: int,
    first_head: int,
    piece_tokens: int,
    cell_bytes: int,
    offsets: Sequence[int],
) -> Slice:
    strides = _strides(geometry)
    first = (first_head - geometry.first_head) * strides["head"]
    return Slice(
        rank=rank,
        num_blocks=geometry.num_blocks,
        block_bytes=geometry.layer_block_bytes,
        pieces_per_block=geometry.block_size // piece_tokens,
        piece_stride=piece_tokens * strides["token"],
        cell_bytes=cell_bytes,
        cell_offsets=tuple(first + offset for offset in offsets),
    )
