"""What stands for the transfer thread where the engine's own connector moves its KV: nothing is pushed or received."""

from __future__ import annotations

from dynrt.transfer.local import BlocksReady


class NoTransfer:
    """As much of transfer.thread.TransferThread as an engine process asks for; deaf."""

    open_handoffs = 0
    turn_age_s = 0.0

    @property
    def agent_metadata(self) -> list[bytes]:
        return []

    @property
    def region_addresses(self) -> list[list[int]]:
        return []

    def start(self) -> None:
        """Nothing runs."""

    def stop(self, timeout_s: float) -> None:
        """Nothing ran."""

    def post(self, event: object) -> None:
        """That a peer is gone, or a prompt begun: the connector finds out by itself."""

    def step_begins(self, ready: list[BlocksReady]) -> None:
        """Nothing waits for these blocks."""

    def layer_written(self, layer: int, event: object | None) -> None:
        """Nor for this layer."""
