"""Sets of workers as bit masks, and their names again (sans-IO)."""

from __future__ import annotations

from dynrt.planner.edge import Bits

MAX_NAMED_SETS = 4096  # remembered translations


class Holders:
    """A worker may have several bits; those of one that left are used again."""

    def __init__(self) -> None:
        self._owners: list[str | None] = []  # by bit number
        self._names_of: dict[Bits, tuple[str, ...]] = {}

    def add(self, name: str) -> Bits:
        """A bit that no worker uses, the lowest, so that masks stay short."""
        self._names_of.clear()
        if None not in self._owners:
            self._owners.append(None)
        number = self._owners.index(None)
        self._owners[number] = name
        return 1 << number

    def drop(self, name: str) -> None:
        """Free all bits of this worker."""
        self._names_of.clear()
        self._owners = [None if owner == name else owner for owner in self._owners]

    def names(self, bits: Bits) -> tuple[str, ...]:
        names = self._names_of.get(bits)
        if names is None:
            if len(self._names_of) >= MAX_NAMED_SETS:
                self._names_of.clear()
            owners = enumerate(self._owners)
            names = tuple(owner for number, owner in owners if owner is not None and bits >> number & 1)
            self._names_of[bits] = names
        return names
