"""How much may be posted and unfinished towards each peer: enough to keep a link busy, little enough to end soon."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_WRITES = 4
WINDOW_S = (
    0.5  # what is posted cannot be recalled, and is waited for by cancels: well within the ledger's settle_s
)
MAX_WRITE_BYTES = 32 << 20  # host memory is copied inside the post: bounds how long one keeps the thread


@dataclass
class _Peer:
    num_writes: int = 0
    num_bytes: int = 0
    is_held: bool = False


class Windows:
    """Counts every write from its post to its end. `byte_s` below: measured seconds per byte, 0 if unknown."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def has_room(self, peer: str, byte_s: float) -> bool:
        """Whether another write may be posted."""
        known = self._peers.get(peer)
        if known is None:
            return True
        if known.is_held or known.num_writes >= WINDOW_WRITES:
            return False
        return known.num_writes == 0 or known.num_bytes * byte_s < WINDOW_S

    def posted(self, peer: str, num_bytes: int) -> None:
        known = self._peers.setdefault(peer, _Peer())
        known.num_writes += 1
        known.num_bytes += num_bytes

    def ended(self, peer: str, num_bytes: int) -> None:
        """A write was seen to end. Of a peer that was fenced meanwhile: no-op."""
        known = self._peers.get(peer)
        if known is not None:
            known.num_writes -= 1
            known.num_bytes -= num_bytes

    def num_writes(self, peer: str) -> int:
        known = self._peers.get(peer)
        return 0 if known is None else known.num_writes

    def hold(self, peer: str) -> None:
        """Post nothing more to it until `resume`."""
        self._peers.setdefault(peer, _Peer()).is_held = True

    def resume(self, peer: str) -> None:
        self._peers.setdefault(peer, _Peer()).is_held = False

    def fenced(self, peer: str) -> None:
        self._peers.pop(peer, None)


def max_write_bytes(byte_s: float) -> int:
    """The largest write, where a link carries a byte in so many seconds: a quarter of the window's time."""
    return MAX_WRITE_BYTES if byte_s == 0 else min(MAX_WRITE_BYTES, int(WINDOW_S / WINDOW_WRITES / byte_s))
