"""An edge of the radix tree: blocks of tokens, and who holds which of them."""

from __future__ import annotations

Bits = int  # a set of holders
Blocks = int  # a set of blocks of one edge, or of one run: bit i is its i-th block


class Edge:
    """`length` blocks of tokens that follow the first `start` blocks of a path, and who holds which of them.

    An edge that is split keeps its lower part, and one that is cut off keeps its parent. So the place of a block
    may be remembered as (edge, depth): it is on that edge or on the way up from it.
    """

    __slots__ = (
        "children",
        "full",
        "length",
        "num_records",
        "parent",
        "partial",
        "repeats",
        "start",
        "tokens",
        "used",
    )

    def __init__(self, parent: Edge | None, start: int, tokens: bytes, length: int) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.length = length
        self.children: dict[bytes, Edge] | None = None  # by their first block's tokens
        self.full: Bits = 0  # who holds all of this edge's blocks
        self.partial: dict[Bits, Blocks] | None = None  # who holds only some: these
        # Who holds which blocks more than once: sets of blocks, and how often each is held beside the first time.
        self.repeats: dict[Bits, dict[Blocks, int]] | None = None
        self.num_records = 0  # entries of `partial` and `repeats`, for what they take of memory
        self.used = 0  # when it was last matched or stored, on the index's own clock

    def held_by(self, bit: Bits) -> Blocks:
        """The blocks of this edge that holder `bit` has."""
        if self.full & bit:
            return (1 << self.length) - 1
        return self.partial.get(bit, 0) if self.partial else 0

    def hold(self, bit: Bits, blocks: Blocks) -> int:
        """Holder `bit` has these blocks (once more, if it had them). Returns by how much the records grew."""
        before = self.num_records
        held = self.held_by(bit)
        if held & blocks:
            self.repeat(bit, held & blocks)
        if blocks & ~held:
            self.set_held(bit, held | blocks)
        return self.num_records - before

    def drop(self, bit: Bits, blocks: Blocks) -> int:
        """Holder `bit` has these blocks once less. Returns by how much the records grew, or shrank."""
        before = self.num_records
        if self.repeats:
            blocks = self._unrepeat(bit, blocks)
        if blocks:
            self.set_held(bit, self.held_by(bit) & ~blocks)
        return self.num_records - before

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
            self.num_records += bit not in self.partial
            self.partial[bit] = held
        elif self.partial and self.partial.pop(bit, 0):
            self.num_records -= 1

    def repeat(self, bit: Bits, blocks: Blocks, times: int = 1) -> None:
        """Holder `bit`, which has these blocks, has them so many times more."""
        if self.repeats is None:
            self.repeats = {}
        counts = self.repeats.setdefault(bit, {})
        self.num_records += blocks not in counts
        counts[blocks] = counts.get(blocks, 0) + times

    def _unrepeat(self, bit: Bits, blocks: Blocks) -> Blocks:
        """Take one holding off each of these blocks that has several; returns those that have but one."""
        assert self.repeats is not None
        counts = self.repeats.get(bit)
        if counts is None:
            return blocks
        for repeated in (
            (blocks,) if blocks in counts else tuple(counts)
        ):  # what came together mostly goes together
            taken = repeated & blocks
            if taken:
                blocks ^= taken
                self._repeat_less(bit, repeated)
                if taken != repeated:
                    self.repeat(bit, repeated ^ taken)
        return blocks

    def _repeat_less(self, bit: Bits, blocks: Blocks) -> None:
        assert self.repeats is not None
        counts = self.repeats[bit]
        if counts[blocks] > 1:
            counts[blocks] -= 1
            return
        del counts[blocks]
        self.num_records -= 1
        if not counts:
            del self.repeats[bit]
