"""What passes between an engine's compute thread and its transfer thread, inside one process."""

from __future__ import annotations

import msgspec


class PrefillOpened(msgspec.Struct, frozen=True):
    """A prompt to be handed off was queued for computing; nothing of it is ready yet."""

    key: bytes
    epoch: int


class BlocksReady(msgspec.Struct, frozen=True):
    """Source blocks of a prompt whose KV becomes complete; pinned from now until ReleaseBlocks.

    They are prompt blocks `first_block, first_block + 1, …`. `written`: complete in every layer already (a prefix
    hit). Otherwise each layer's part is complete when LayerWritten names that layer in this step.
    A partly filled block is announced once, when the prompt's last token is written. After a preemption blocks
    can be announced again, from other memory: the first announcement counts.
    """

    key: bytes
    epoch: int
    first_block: int
    block_ids: list[int]
    written: bool
    num_prompt_tokens: int


class StepBegins(msgspec.Struct, frozen=True):
    """A step that completes these blocks starts; the layers follow in order."""

    ready: list[BlocksReady]


class LayerWritten(msgspec.Struct, frozen=True):
    """This layer's KV of the current step is written (on CUDA: once `event.query()` is true)."""

    layer: int
    event: object | None = None


class ReservationMade(msgspec.Struct, frozen=True):
    """Blocks are set aside here for a prompt that `peer` will push."""

    key: bytes
    epoch: int
    peer: str
    first_block: int
    block_ids: list[int]
    lease_s: float
    num_prompt_tokens: int


class CommitBlocks(msgspec.Struct, frozen=True):
    """Transfer to compute: the reservation is filled, decode on behind `first_token` (None: sample it)."""

    key: bytes
    epoch: int
    first_token: int | None


class ReleaseBlocks(msgspec.Struct, frozen=True):
    """Transfer to compute: unpin the source blocks, or free the reservation."""

    key: bytes
    epoch: int


ToCompute = CommitBlocks | ReleaseBlocks
