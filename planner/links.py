"""How fast KV travels between workers, learned from the handoffs (sans-IO)."""

from __future__ import annotations

ASSUMED_BYTES_PER_MS = 1e6  # 1 GB/s
ASSUMED_HANDOFF_MS = 3.0
LEAST_HANDOFF_MS = 0.5
FORGETTING = 0.95

Pair = tuple[str, str]  # (prefill worker, decode worker)


class Links:
    """Rates by pair, and what a handoff costs whatever its size.

    A push also waits for compute, so what is seen of a link's rate is a lower bound, and what is seen of the fixed
    cost an upper one: kept are a slowly forgetting maximum and minimum.
    """

    def __init__(self) -> None:
        self.handoff_ms = ASSUMED_HANDOFF_MS
        self._bytes_per_ms: dict[Pair, float] = {}

    def add(self, pair: Pair) -> None:
        """The pair can hand over from now on."""
        self._bytes_per_ms.setdefault(pair, ASSUMED_BYTES_PER_MS)

    def drop(self, pair: Pair) -> None:
        self._bytes_per_ms.pop(pair, None)

    def drop_worker(self, worker: str) -> None:
        for pair in [pair for pair in self._bytes_per_ms if worker in pair]:
            del self._bytes_per_ms[pair]

    def __contains__(self, pair: Pair) -> bool:
        return pair in self._bytes_per_ms

    @property
    def pairs(self) -> set[Pair]:
        return set(self._bytes_per_ms)

    @property
    def fastest(self) -> float:
        """Bytes a millisecond of the fastest pair."""
        return max(self._bytes_per_ms.values(), default=ASSUMED_BYTES_PER_MS)

    def rate(self, pair: Pair) -> float:
        """Bytes a millisecond."""
        return self._bytes_per_ms[pair]

    def pushed(self, pair: Pair, kv_bytes: int, duration_s: float) -> None:
        """So many bytes went from the first post to the last arrival in this time. An unknown pair is no news."""
        if pair in self._bytes_per_ms and duration_s > 0:
            seen = kv_bytes / (duration_s * 1e3)
            self._bytes_per_ms[pair] = max(FORGETTING * self._bytes_per_ms[pair], seen, 1.0)

    def exposed(self, exposed_s: float) -> None:
        """A handoff let its decode start so much later than no transfer would have."""
        self.handoff_ms = max(min(self.handoff_ms / FORGETTING, exposed_s * 1e3), LEAST_HANDOFF_MS)
