"""A radix tree over packed token ids whose edges know, block by block, which holders have them.

Exact: token bytes are compared, never hashes of them. An edge is one `bytes` of many blocks, so a look-up costs a
dictionary access, one memcmp and a few operations on int bit masks per edge, whatever the number of holders.
"""

from __future__ import annotations

Bits = int  # a set of holders
Blocks = int  # a set of blocks of one edge, or of one run: bit i is its i-th block


class Edge:
    """`length` blocks of tokens that follow the first `start` blocks of a path, and who holds which of them.

    An edge that is split keeps its lower part, and one that is cut off keeps its parent. So the place of a block
    may be remembered as (edge, depth): it is on that edge or on the way up from it.
    """

    __slots__ = ("children", "full", "length", "parent", "partial", "repeats", "start", "tokens")

    def __init__(self, parent: Edge | None, start: int, tokens: bytes, length: int) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.length = length
        self.children: dict[bytes, Edge] | None = None  # by their first block's tokens
        self.full: Bits = 0  # who holds all of this edge's blocks
        self.partial: dict[Bits, Blocks] | None = None  # who holds only some: these
        self.repeats: dict[Bits, list[Blocks]] | None = None  # i-th entry: held at least i + 2 times

    @property
    def end(self) -> int:
        return self.start + self.length

    def held_by(self, bit: Bits) -> Blocks:
        """The blocks of this edge that holder `bit` has."""
        if self.full & bit:
            return (1 << self.length) - 1
        return self.partial.get(bit, 0) if self.partial else 0

    def hold(self, bit: Bits, blocks: Blocks) -> None:
        """Holder `bit` has these blocks (once more, if it had them)."""
        held = self.held_by(bit)
        if held & blocks:
            self._repeat(bit, held & blocks)
        self.set_held(bit, held | blocks)

    def drop(self, bit: Bits, blocks: Blocks) -> None:
        """Holder `bit` has these blocks once less."""
        if self.repeats:
            blocks = self._unrepeat(bit, blocks)
        self.set_held(bit, self.held_by(bit) & ~blocks)

    def num_used(self) -> int:
        """Blocks up to the last one that anybody holds."""
        if self.full:
            return self.length
        return max(self.partial.values()).bit_length() if self.partial else 0

    def set_held(self, bit: Bits, held: Blocks) -> None:
        """From now on holder `bit` has exactly these."""
        if held == (1 << self.length) - 1:
            self.full |= bit
            held = 0
        else:
            self.full &= ~bit
        if held:
            if self.partial is None:
                self.partial = {}
            self.partial[bit] = held
        elif self.partial:
            self.partial.pop(bit, None)

    def _repeat(self, bit: Bits, blocks: Blocks) -> None:
        if self.repeats is None:
            self.repeats = {}
        layers = self.repeats.setdefault(bit, [])
        for index, layer in enumerate(layers):
            layers[index] = layer | blocks
            blocks &= layer
        if blocks:
            layers.append(blocks)

    def _unrepeat(self, bit: Bits, blocks: Blocks) -> Blocks:
        """Take one holding off each block that has several; those that had but one."""
        assert self.repeats is not None
        layers = self.repeats.get(bit, [])
        for index in reversed(range(len(layers))):
            layer = layers[index]
            layers[index] = layer & ~blocks
            blocks &= ~layer
        while layers and not layers[-1]:
            layers.pop()
        if not layers:
            self.repeats.pop(bit, None)
        return blocks


class RadixTree:
    """All paths of one salt and one block size; `block_bytes` are the bytes of one block's token ids."""

    __slots__ = ("block_bytes", "root", "salt")

    def __init__(self, salt: str, block_bytes: int) -> None:
        self.salt = salt
        self.block_bytes = block_bytes
        self.root = Edge(None, 0, b"", 0)

    def match(self, prompt: bytes) -> list[tuple[int, Bits]]:
        """How many leading blocks of `prompt` who holds, ascending; the last word on a holder counts."""
        block_bytes = self.block_bytes
        matches: list[tuple[int, Bits]] = []
        edge = self.root
        alive, position, depth = -1, 0, 0  # alive: who holds every block so far; at first, all
        while alive and edge.children:
            child = edge.children.get(prompt[position : position + block_bytes])
            if child is None:
                break
            edge = child
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
        position = 0
        while position < len(tokens):
            inside = depth - edge.start
            if inside < edge.length:
                common = self._count_common(edge.tokens, inside * self.block_bytes, tokens, position)
                if common:
                    edge.hold(bit, ((1 << common) - 1) << inside)
                    depth += common
                    position += common * self.block_bytes
                else:
                    edge = self._part(edge, inside)
                continue
            below = self._child(edge, tokens, position)
            if below is None:
                return self._append(edge, tokens[position:], bit)
            edge = below
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
                edge.drop(bit, here)
                self._shrink(edge)
            if blocks:
                assert edge.parent is not None
                edge = edge.parent

    @property
    def is_empty(self) -> bool:
        return not self.root.children

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

    def _child(self, edge: Edge, tokens: bytes, position: int) -> Edge | None:
        if edge.children is None:
            return None
        return edge.children.get(tokens[position : position + self.block_bytes])

    def _append(self, edge: Edge, tokens: bytes, bit: Bits) -> Edge:
        """New blocks behind the end of `edge`: a longer leaf where only `bit` holds all of it, else a new leaf."""
        count = len(tokens) // self.block_bytes
        is_leaf = edge.children is None and edge is not self.root
        if is_leaf and not edge.full & ~bit:
            held = edge.held_by(bit) | ((1 << count) - 1) << edge.length
            edge.full = 0
            edge.tokens += tokens
            edge.length += count
            edge.set_held(bit, held)
            return edge
        leaf = Edge(edge, edge.end, tokens, count)
        leaf.full = bit
        self._adopt(edge, leaf)
        return leaf

    def _adopt(self, parent: Edge, child: Edge) -> None:
        if parent.children is None:
            parent.children = {}
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
        self._adopt(parent, upper)
        lower.parent = upper
        lower.start += at
        lower.tokens = lower.tokens[cut:]
        lower.length -= at
        self._adopt(upper, lower)
        _divide_holdings(upper, lower, at)
        return upper

    def _shrink(self, edge: Edge) -> None:
        """Give back the end of a leaf once nobody holds half of it, and leaves that nobody holds at all."""
        while edge.parent is not None and edge.children is None:
            used = edge.num_used()
            if used:
                if 2 * used <= edge.length:
                    self._truncate(edge, used)
                return
            parent = edge.parent
            assert parent.children is not None
            del parent.children[edge.tokens[: self.block_bytes]]
            if not parent.children:
                parent.children = None
            edge = parent

    def _truncate(self, edge: Edge, length: int) -> None:
        assert edge.partial is not None
        edge.tokens = edge.tokens[: length * self.block_bytes]
        edge.length = length
        for bit, held in list(edge.partial.items()):
            edge.set_held(bit, held)


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
    for bit, held in partial.items():
        upper.set_held(bit, held & first_blocks)
        lower.set_held(bit, held >> at)
    for bit, layers in repeats.items():
        for layer in layers:
            _add_layer(upper, bit, layer & first_blocks)
            _add_layer(lower, bit, layer >> at)


def _add_layer(edge: Edge, bit: Bits, layer: Blocks) -> None:
    if layer:
        if edge.repeats is None:
            edge.repeats = {}
        edge.repeats.setdefault(bit, []).append(layer)
