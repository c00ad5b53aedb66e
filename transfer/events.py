"""What the three parties of a handoff tell each other: runtime, prefill end and decode end.

Every message names its handoff by `key` (16 bytes, made by the runtime) and `epoch` (one per attempt),
is idempotent, and may be lost with its sender; who acts then is in docs/handoff.md.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dynrt.transfer.layout import KvGeometry

KEY_BYTES = 16

HandoffId = tuple[bytes, int]  # key, epoch

Cause = Literal[
    "cancelled",  # nobody wanted it any more
    "transport",  # a write failed or stalled
    "lease",  # the decode end heard nothing for its lease
    "refused",  # decode did not take this prompt
    "unfit",  # no decode worker of this kind can take it
    "overdue",  # an end did not answer in time
    "fenced",  # a worker died
    "checksum",  # bytes arrived that were not sent
    "mismatch",  # the two ends disagree about the prompt's length
    "no_room",  # the prompt was computed and decode still had no blocks for it
]


class HandoffMessage(msgspec.Struct, frozen=True):
    """Root of the messages about one handoff."""

    key: bytes
    epoch: int

    @property
    def id(self) -> HandoffId:
        return self.key, self.epoch


# --- runtime to the prefill end -------------------------------------------------------------------


class Arm(HandoffMessage, frozen=True, tag=True):
    """The target is known: push the prompt from `peer`'s block `first_block` on into these blocks of it."""

    peer: str  # the decode worker's incarnation
    first_block: int
    block_ids: list[int]
    num_tokens: int  # of the prompt


class Retarget(HandoffMessage, frozen=True, tag=True):
    """No target came for this finished prompt: it waits for one as `new_epoch` from now on.

    Only sent while no target is known. If it cannot be, Quiesced of the new epoch is the answer.
    """

    new_epoch: int

    @property
    def new_id(self) -> HandoffId:
        return self.key, self.new_epoch


# --- runtime to the decode end --------------------------------------------------------------------


class FirstToken(HandoffMessage, frozen=True, tag=True):
    """The token that the client saw first, and how much of its text was sent."""

    token_id: int
    chars_emitted: int


class RenewLease(msgspec.Struct, frozen=True, tag=True):
    """The runtime still wants these reservations."""

    ids: list[HandoffId]
    lease_s: float


class PeerQuiesced(HandoffMessage, frozen=True, tag=True):
    """Relayed from the prefill end: nothing is in flight for this handoff, nothing will be posted again."""

    clean: bool = True  # as in Quiesced


# --- runtime to either end ------------------------------------------------------------------------


class CancelHandoff(HandoffMessage, frozen=True, tag=True):
    """Stop this handoff. Answered by Quiesced (prefill end) or, once that is known, Drained (decode end)."""

    reason: str


class FencePeer(msgspec.Struct, frozen=True, tag=True):
    """That incarnation is dead: its process has ended. All handoffs with it are over."""

    incarnation: str


class ConnectPeer(msgspec.Struct, frozen=True, tag=True):
    """Prefill: connect to this decode worker. Decode: keep polling, this prefill worker is about to connect."""

    incarnation: str
    agent_metadata: list[bytes]  # one per rank
    region_addresses: list[list[int]]  # per rank, the address of each layer's region
    geometry: list[KvGeometry]  # one per rank
    will_push: bool  # True to the end that pushes


# --- the prefill end to the runtime ---------------------------------------------------------------


class PeerConnected(msgspec.Struct, frozen=True, tag=True):
    """The prefill end can push to `incarnation`; `error` says why not (any more)."""

    incarnation: str
    error: str | None = None


class Sent(HandoffMessage, frozen=True, tag=True):
    """Every posted write was seen DONE; the source blocks are unpinned."""

    kv_bytes: int
    num_writes: int
    post_s: float  # seconds that the transfer thread spent inside post calls
    link_s: float  # that the link was busy with these writes: each from its post, or its predecessor's end


class Quiesced(HandoffMessage, frozen=True, tag=True):
    """Nothing posted is unfinished and nothing will be posted again for this handoff."""

    reason: str
    clean: bool = True  # False: a write failed on a broken connection, bytes already sent may still land
    cause: Cause = "cancelled"


class Stalled(HandoffMessage, frozen=True, tag=True):
    """Writes of this handoff do not end. The prefill end posts no more, but Quiesced may never come."""


# --- the decode end to the runtime ----------------------------------------------------------------


class Reserved(HandoffMessage, frozen=True, tag=True):
    """Blocks are set aside for prompt blocks `first_block, …`; earlier ones are this worker's own prefix hit."""

    first_block: int
    block_ids: list[int]
    num_tokens: int  # of the prompt; blocks are counted otherwise where they are larger or smaller


class ReserveRefused(HandoffMessage, frozen=True, tag=True):
    """Nothing is held. `is_unfit`: the request can never run here."""

    reason: str
    is_unfit: bool = False


class Committed(HandoffMessage, frozen=True, tag=True):
    """All units were counted and the first token is known: the blocks are now the request's."""

    received_at: float  # this host's CLOCK_MONOTONIC when the last unit was counted
    host: str


class Drained(HandoffMessage, frozen=True, tag=True):
    """The reservation is over and its blocks are free."""

    reason: str
    cause: Cause = "cancelled"


class LeaseExpired(HandoffMessage, frozen=True, tag=True):
    """The decode end has heard nothing for its lease and cancels; it frees nothing by itself.

    Said again after each further lease: the runtime that opened the handoff may be gone, and the next one does
    not know it.
    """

    peer: str  # the prefill worker's incarnation


ToPrefillEnd = Arm | Retarget | CancelHandoff | FencePeer | ConnectPeer
ToDecodeEnd = FirstToken | RenewLease | PeerQuiesced | CancelHandoff | FencePeer | ConnectPeer
FromPrefillEnd = PeerConnected | Sent | Quiesced | Stalled
FromDecodeEnd = Reserved | ReserveRefused | Committed | Drained | LeaseExpired
