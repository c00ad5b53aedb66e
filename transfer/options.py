"""How a transfer thread is set up, as far as an engine is told."""

from __future__ import annotations

import msgspec

from dynrt.transfer.faults import Fault
from dynrt.transfer.throttle import LinkSpeed


class TransferOptions(msgspec.Struct, frozen=True):
    """`verify`: commit a handoff only if every block's checksum is that of what was sent; host memory only.

    `backends`: NIXL's plug-ins that a write may go by, NIXL chooses among those that both ends have. `ucx`: settings
    of UCX by name, over our own. The others are for tests and benches: a trace of the thread, a slow link, injected
    faults.
    """

    verify: bool = False
    backends: tuple[str, ...] = ("UCX",)
    ucx: dict[str, str] = msgspec.field(default_factory=dict)
    trace: str | None = None  # path of a file
    throttle: LinkSpeed | None = None
    faults: tuple[Fault, ...] = ()
