"""What passes between a transfer thread and the rank processes of its engine."""

from __future__ import annotations

import msgspec

from dynrt.transfer.events import ConnectPeer
from dynrt.transfer.layout import KvGeometry
from dynrt.transfer.mapping import KvMapping
from dynrt.transfer.write import Write

# --- transfer thread to a rank: the calls of transfer.agent.Agent ---------------------------------


class OpenAgent(msgspec.Struct, frozen=True, tag=True):
    """Set up NIXL and register the memory. Answered by AgentOpened."""

    name: str
    backends: tuple[str, ...]


class ConnectAgent(msgspec.Struct, frozen=True, tag=True):
    """Answered by AgentConnected."""

    peer: ConnectPeer
    mapping: KvMapping


class RemovePeer(msgspec.Struct, frozen=True, tag=True):
    incarnation: str


class PostWrite(msgspec.Struct, frozen=True, tag=True):
    """`number`: not used before. Answered by WriteEnded, unless let go of before."""

    number: int
    write: Write
    notification: bytes


class LetGo(msgspec.Struct, frozen=True, tag=True):
    """That write is waited for no more."""

    number: int


class SendNotification(msgspec.Struct, frozen=True, tag=True):
    peer: str
    notification: bytes


class PollOnce(msgspec.Struct, frozen=True, tag=True):
    """Poll at least once from now. Answered by Polled, behind all that this poll brought."""


class CloseAgent(msgspec.Struct, frozen=True, tag=True):
    """Answered by AgentClosed, the last message."""


ToRank = OpenAgent | ConnectAgent | RemovePeer | PostWrite | LetGo | SendNotification | PollOnce | CloseAgent

# --- a rank to the transfer thread ----------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message."""

    rank: int
    pid: int
    geometry: KvGeometry
    device: int | None  # as in KvRegion


class AgentOpened(msgspec.Struct, frozen=True, tag=True):
    metadata: bytes
    region_addresses: list[int]
    error: str | None = None  # why there is no agent


class AgentConnected(msgspec.Struct, frozen=True, tag=True):
    error: str | None = None


class WriteEnded(msgspec.Struct, frozen=True, tag=True):
    number: int
    has_failed: bool


class Notified(msgspec.Struct, frozen=True, tag=True):
    notifications: list[bytes]


class Polled(msgspec.Struct, frozen=True, tag=True):
    """Answers one PollOnce."""


class LayerDone(msgspec.Struct, frozen=True, tag=True):
    """This rank's part of that layer, and of all before it, is written."""

    step: int  # counted from 1
    layer: int


class AgentClosed(msgspec.Struct, frozen=True, tag=True):
    pass


FromRank = Hello | AgentOpened | AgentConnected | WriteEnded | Notified | Polled | LayerDone | AgentClosed
