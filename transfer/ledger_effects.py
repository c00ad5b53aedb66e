"""What the ledger asks of the runtime: messages to send, workers to end, outcomes to tell."""

from __future__ import annotations

from typing import Literal

import msgspec

from dynrt.transfer.events import Cause, HandoffId, ToDecodeEnd, ToPrefillEnd

Outcome = Literal["committed", "cancelled", "fenced", "failed"]


class Send(msgspec.Struct, frozen=True):
    """Send `message` to the worker of that incarnation."""

    to: str
    message: ToPrefillEnd | ToDecodeEnd


class Kill(msgspec.Struct, frozen=True):
    """One of these workers hangs: end its process, and call `worker_lost` once it is dead.

    The likeliest comes first; but a write does not end either if its receiver hangs, which the caller can tell.
    """

    suspects: tuple[str, ...]
    reason: str


class Decided(msgspec.Struct, frozen=True):
    """The request's side is settled, once per handoff.

    After any outcome but "committed" the caller also cancels the request on both workers: the decode end can have
    committed in the same moment, and then decodes for nobody.
    """

    id: HandoffId
    outcome: Outcome
    reason: str
    received_at: float | None = None  # "committed": when the last unit was counted, on the clock of `host`
    host: str | None = None
    cause: Cause | None = None  # None: "committed"


class Closed(msgspec.Struct, frozen=True):
    """Both ends are through with this handoff: nothing of it is held anywhere."""

    id: HandoffId
    kv_bytes: int | None  # None: the prefill end did not send all


LedgerEffect = Send | Kill | Decided | Closed
