"""A radix tree over packed token ids whose edges know, block by block, which holders have them.

Exact: token bytes are compared, never hashes of them. An edge is one `bytes` of many blocks, so a look-up costs a
dictionary access, one memcmp and a few operations on int bit masks per edge, whatever the number of holders.
"""

from __future__ import annotations

from dynrt.planner.edge import Bits, Blocks, Edge
from dynrt.planner.index_memory import CHILDREN_BYTES, RECORD_BYTES, IndexMemory, edge_bytes


class RadixTree:
    """All paths of one salt and one block size; `block_bytes` are the bytes of one block's token ids."""

    __slots__ = ("_memory", "block_bytes", "root", "salt")

    def __init__(self, salt: str, block_bytes: int, memory: IndexMemory) -> None:
        self.salt = salt
        self.block_bytes = block_bytes
        self.root = Edge(None, 0, b"", 0)
        self._memory = memory

    def match(self, prompt: bytes) -> list[tuple[int, Bits]]:
        """How many leading blocks of `prompt` who holds, ascending; the last word on a holder counts."""
        block_bytes = self.block_bytes
        memory = self._memory
        now = memory.clock = memory.clock + 1
        matches: list[tuple[int, Bits]] = []
        edge = self.root
        alive, position, depth = -1, 0, 0  # alive: who holds every block so far; at first, all
        while alive and edge.children:
            child = edge.children.get(prompt[position : position + block_bytes])
            if child is None:
                break
            edge = child
            edge.used = now
            whole = prompt.startswith(edge.tokens, position)
            common = edge.length if whole else self._count_common(edge.tokens, 0, prompt, position)
            leaving = alive & ~edge.full
            if leaving:
                if depth:
                    matches.append((depth, leaving))
                if edge.partial:
                    matches += _partial_matches(edge.partial, leaving, depth, common)
                alive &= edge.full
            depth += common
            position += common * block_bytes
            if not whole:
                break
        if alive > 0:
            matches.append((depth, alive))
        matches.sort()
        return matches

    def insert(self, edge: Edge, depth: int, tokens: bytes, bit: Bits) -> Edge:
        """Holder `bit` has the blocks `tokens` below the first `depth` blocks of the path through `edge`.

        Returns the edge that the last of them is on.
        """
        block_bytes = self.block_bytes
        position = 0
        while position < len(tokens):
            inside = depth - edge.start
            if inside == edge.length:
                below = edge.children and edge.children.get(tokens[position : position + block_bytes])
                if not below:
                    edge = self._append(edge, tokens[position:], bit)
                    break
                edge, inside = below, 0
            if not inside and tokens.startswith(edge.tokens, position):
                common = edge.length
            else:
                common = self._count_common(edge.tokens, inside * block_bytes, tokens, position)
            if common:
                self._memory.num_bytes += RECORD_BYTES * edge.hold(bit, ((1 << common) - 1) << inside)
                depth += common
                position += common * block_bytes
            else:
                edge = self._part(edge, inside)
        self._touch(edge)
        return edge

    def drop(self, edge: Edge, first: int, blocks: Blocks, bit: Bits) -> None:
        """Take back from `bit` those of the blocks at depths `first, first + 1, …` on the path up from `edge`."""
        while blocks:
            skipped = edge.start - first  # blocks of the run that lie above this edge
            if skipped > 0:
                here, blocks = blocks >> skipped, blocks & ((1 << skipped) - 1)
            else:
                here, blocks = blocks << -skipped, 0
            if here:
                self._memory.num_bytes += RECORD_BYTES * edge.drop(bit, here)
                if edge.children is None:
                    self._shrink(edge)
            if blocks:
                assert edge.parent is not None
                edge = edge.parent

    @property
    def is_empty(self) -> bool:
        return not self.root.children

    def _touch(self, edge: Edge) -> None:
        """This edge is in use, and so are those above it."""
        memory = self._memory
        now = memory.clock = memory.clock + 1
        while edge.parent is not None:
            edge.used = now
            edge = edge.parent

    def _count_common(self, tokens: bytes, at: int, other: bytes, other_at: int) -> int:
        """Equal leading blocks of `tokens[at:]` and `other[other_at:]`, by bisection with memcmp."""
        size = self.block_bytes
        differ = min(len(tokens) - at, len(other) - other_at) // size
        if tokens.startswith(other[other_at : other_at + differ * size], at):
            return differ
        equal = 0
        while differ - equal > 1:
            middle = (equal + differ) // 2
            part = other[other_at + equal * size : other_at + middle * size]
            if tokens.startswith(part, at + equal * size):
                equal = middle
            else:
                differ = middle
        return equal

    def _append(self, edge: Edge, tokens: bytes, bit: Bits) -> Edge:
        """New blocks behind the end of `edge`: a longer leaf where only `bit` holds all of it, else a new leaf."""
        count = len(tokens) // self.block_bytes
        is_leaf = edge.children is None and edge is not self.root
        if is_leaf and not edge.full & ~bit:
            return self._lengthen(edge, tokens, bit)
        leaf = Edge(edge, edge.start + edge.length, tokens, count)
        leaf.full = bit
        self._memory.num_bytes += edge_bytes(leaf, self.block_bytes)
        self._adopt(edge, leaf)
        return leaf

    def _lengthen(self, leaf: Edge, tokens: bytes, bit: Bits) -> Edge:
        count = len(tokens) // self.block_bytes
        held = leaf.held_by(bit) | ((1 << count) - 1) << leaf.length
        before = edge_bytes(leaf, self.block_bytes)
        leaf.full = 0
        leaf.tokens += tokens
        leaf.length += count
        leaf.set_held(bit, held)
        self._memory.num_bytes += edge_bytes(leaf, self.block_bytes) - before
        return leaf

    def _adopt(self, parent: Edge, child: Edge) -> None:
        if parent.children is None:
            parent.children = {}
            self._memory.num_bytes += CHILDREN_BYTES
        parent.children[child.tokens[: self.block_bytes]] = child

    def _part(self, edge: Edge, at: int) -> Edge:
        """Make an edge end behind its first `at` blocks, because another path goes on from there."""
        if edge.children is None and edge.num_used() <= at:
            self._truncate(edge, at)  # the rest was only not given back yet
            return edge
        return self._split(edge, at)

    def _split(self, lower: Edge, at: int) -> Edge:
        """Cut an edge behind its first `at` blocks; the new, upper part. The lower one stays the same object."""
        cut = at * self.block_bytes
        parent = lower.parent
        assert parent is not None and 0 < at < lower.length
        upper = Edge(parent, lower.start, lower.tokens[:cut], at)
        upper.used = lower.used
        before = edge_bytes(lower, self.block_bytes)
        self._adopt(parent, upper)
        lower.parent = upper
        lower.start += at
        lower.tokens = lower.tokens[cut:]
        lower.length -= at
        self._adopt(upper, lower)
        _divide_holdings(upper, lower, at)
        self._memory.num_bytes += (
            edge_bytes(upper, self.block_bytes) + edge_bytes(lower, self.block_bytes) - before
        )
        return upper

    def _shrink(self, edge: Edge) -> None:
        """Give back the end of a leaf once nobody holds half of it, and leaves that nobody holds at all."""
        while edge.parent is not None and edge.children is None and not edge.full:
            if edge.partial:
                used = edge.num_used()
                if 2 * used <= edge.length:
                    self._truncate(edge, used)
                return
            parent = edge.parent
            assert parent.children is not None
            del parent.children[edge.tokens[: self.block_bytes]]
            if not parent.children:
                parent.children = None
                self._memory.num_bytes -= CHILDREN_BYTES
            self._memory.num_bytes -= edge_bytes(edge, self.block_bytes)
            edge = parent

    def _truncate(self, edge: Edge, length: int) -> None:
        assert edge.partial is not None
        before = edge_bytes(edge, self.block_bytes)
        edge.tokens = edge.tokens[: length * self.block_bytes]
        edge.length = length
        for bit, held in list(edge.partial.items()):
            edge.set_held(bit, held)
        self._memory.num_bytes += edge_bytes(edge, self.block_bytes) - before


def _partial_matches(
    partial: dict[Bits, Blocks], leaving: Bits, depth: int, common: int
) -> list[tuple[int, Bits]]:
    """How far those holders get who hold a part of an edge of which the prompt has `common` blocks."""
    matches = []
    for bit, blocks in partial.items():
        if bit & leaving:
            leading = (blocks & ~(blocks + 1)).bit_length()
            if leading:
                matches.append((depth + min(leading, common), bit))
    return matches


def _divide_holdings(upper: Edge, lower: Edge, at: int) -> None:
    """Give each part of an edge that was split behind `at` blocks its share of what was known of the whole."""
    first_blocks = (1 << at) - 1
    upper.full = lower.full
    partial, repeats = lower.partial or {}, lower.repeats or {}
    lower.partial = lower.repeats = None
    lower.num_records = 0
    for bit, held in partial.items():
        upper.set_held(bit, held & first_blocks)
        lower.set_held(bit, held >> at)
    for bit, counts in repeats.items():
        for blocks, times in counts.items():
            if blocks & first_blocks:
                upper.repeat(bit, blocks & first_blocks, times)
            if blocks >> at:
                lower.repeat(bit, blocks >> at, times)
