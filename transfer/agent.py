"""What the transfer thread needs of the agent that moves its bytes: NIXL's, or one wrapped around that."""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from dynrt.transfer.events import ConnectPeer
from dynrt.transfer.mapping import KvMapping
from dynrt.transfer.write import Write


class NixlError(Exception):
    """NIXL, or the connection under it, failed."""


class WriteState(Enum):
    """NIXL's names: where a posted write is."""

    DONE = "DONE"
    IN_FLIGHT = "PROC"
    FAILED = "ERR"


class Agent(Protocol):
    """One rank's agent; `transfer.nixl_agent.NixlAgent` says what each method does. One thread makes all calls."""

    @property
    def metadata(self) -> bytes: ...

    @property
    def region_addresses(self) -> list[int]: ...

    def connect_peer(self, peer: ConnectPeer, mapping: KvMapping) -> None: ...

    def remove_peer(self, incarnation: str) -> None: ...

    def post_write(self, write: Write, notification: bytes) -> Any: ...

    def poll_write(self, handle: Any) -> WriteState: ...

    def release_write(self, handle: Any) -> None: ...

    def poll_notifications(self) -> list[bytes]: ...

    @property
    def num_polls(self) -> int:
        """How often NIXL was polled and all that this brought was returned: in another process that takes a while."""

    def notify(self, peer: str, notification: bytes) -> None: ...

    def close(self) -> None: ...
