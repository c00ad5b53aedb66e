"""The prefill end of all handoffs of one worker: which writes may be posted, and when source blocks are free.

Sans-IO: events and the time go in, effects come out; the transfer thread posts what `next_write` returns and says
how each write ended. The table of states and events is docs/handoff.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from dynrt.transfer.bounded import BoundedDict
from dynrt.transfer.coalescing import Pacing
from dynrt.transfer.effects import Notify, Order, PrefillEffect, Tell
from dynrt.transfer.events import Arm, CancelHandoff, Cause, HandoffId, Quiesced, Retarget, Sent, Stalled
from dynrt.transfer.extents import Extent, Target
from dynrt.transfer.layout import KvGeometry, Mismatch
from dynrt.transfer.local import BlocksReady, PrefillOpened, ReleaseBlocks
from dynrt.transfer.mapping import KvMapping, map_kv
from dynrt.transfer.notifications import encode_quiesced
from dynrt.transfer.window import Windows, max_write_bytes
from dynrt.transfer.write import Write

TOMBSTONES = 8192  # ended handoffs remembered, so that nothing late can open them again
STALL_S = 5.0  # several times what a full window takes


class PrefillState(Enum):
    """States that still hold something; SENT, QUIESCED and FENCED hold nothing and leave a tombstone."""

    COMPUTING = auto()  # no target yet: finished layers wait
    PUSHING = auto()  # ARMED until the first write is posted
    CANCELLING = auto()  # posts nothing more, waits for what was posted


@dataclass
class _Handoff:
    id: HandoffId
    source_id: HandoffId  # as it was opened: the engine knows its blocks by that
    number: int  # in the order in which they were opened
    state: PrefillState = PrefillState.COMPUTING
    target: Target | None = None
    extents: list[Extent] = field(default_factory=list)  # not yet posted in full, oldest first
    num_announced: int = 0  # prompt blocks 0 … num_announced - 1 were announced
    num_prompt_blocks: int | None = None
    num_prompt_tokens: int | None = None
    num_unfinished: int = 0  # posted, not yet seen DONE
    moved_at: float = 0.0  # the last time that a write was posted or seen to end
    is_stalled: bool = False
    clean: bool = True
    reason: str = ""
    cause: Cause = "cancelled"
    kv_bytes: int = 0
    num_writes: int = 0
    post_s: float = 0.0
    link_s: float = 0.0

    @property
    def peer(self) -> str | None:
        return None if self.target is None else self.target.arm.peer

    @property
    def urgency(self) -> tuple[int, int]:
        """Blocks still to be computed, least first: whose prompt ends soonest. Then first come, first served."""
        assert self.num_prompt_blocks is not None, "nothing was announced"
        return self.num_prompt_blocks - self.num_announced, self.number

    def next_write(self, max_bytes: int) -> Write | None:
        """Of what was announced first, as far as it may be posted."""
        assert self.target is not None
        writes = (extent.next_write(self.target, max_bytes) for extent in self.extents)
        return next((write for write in writes if write is not None), None)


class PrefillEnd:
    """All handoffs whose prompts are computed here. `geometry`: of this worker's ranks."""

    def __init__(self, geometry: Sequence[KvGeometry]) -> None:
        self._geometry = geometry
        self._num_layers = geometry[0].num_layers
        self._layer_block_bytes = sum(rank.layer_block_bytes for rank in geometry)
        self._mappings: dict[str, KvMapping] = {}  # by peer
        self._pacing = Pacing(self._num_layers)
        self._open: dict[HandoffId, _Handoff] = {}
        self._moved: dict[HandoffId, HandoffId] = {}  # what the engine calls a retargeted one: its present id
        self._ended: BoundedDict[HandoffId, None] = BoundedDict(TOMBSTONES)
        self._step: list[Extent] = []  # extents that the current step completes
        self._step_ids: list[HandoffId] = []  # as the engine calls them
        self._num_opened = 0
        self.layers_per_push = 1  # in the current step: between these, a layer has nothing posted
        self._windows = Windows()
        self._postable: dict[str, set[HandoffId]] = {}  # by peer, handoffs that may have something to post

    @property
    def num_open(self) -> int:
        return len(self._open)

    def knows(self, handoff_id: HandoffId) -> bool:
        """Whether it is open here, or was."""
        return handoff_id in self._open or handoff_id in self._ended

    # --- from the compute thread ------------------------------------------------------------------

    def opened(self, event: PrefillOpened) -> list[PrefillEffect]:
        """A prompt was queued for computing."""
        handoff_id = event.key, event.epoch
        if handoff_id in self._ended:
            return [Order(ReleaseBlocks(*handoff_id))]
        self._get_or_open(handoff_id)  # its Arm can have come before
        return []

    def step_begins(self, ready: list[BlocksReady], now: float) -> list[PrefillEffect]:
        """A step starts that completes these blocks; the one before has written all its layers."""
        assert all(extent.layers_written == self._num_layers for extent in self._step), (
            "a step was left unfinished"
        )
        self._step, self._step_ids = [], []
        effects = [effect for blocks in ready for effect in self._announced(blocks)]
        num_blocks = sum(len(extent.block_ids) for extent in self._step)
        self._pacing.step_begins(num_blocks, now)
        layer_bytes = num_blocks * self._layer_block_bytes
        num_writes = len(self._step) * len(self._geometry)  # about: one for each route
        group = self._pacing.layers_per_push(num_writes, num_blocks, layer_bytes)
        self.layers_per_push = group
        for extent in self._step:
            extent.layers_per_push = group
        return effects

    def layer_written(self, layer: int, now: float) -> list[PrefillEffect]:
        """Layer's KV of the current step is in memory. Layers come in order."""
        self._pacing.layer_written(layer, now)
        for extent in self._step:
            assert extent.layers_written == layer, f"layer {layer} came after {extent.layers_written} layers"
            extent.layers_written = layer + 1
        handoff_ids = [self._moved.get(source_id, source_id) for source_id in self._step_ids]
        return [effect for handoff_id in handoff_ids for effect in self._progressed(handoff_id)]

    def _announced(self, ready: BlocksReady) -> list[PrefillEffect]:
        source_id = ready.key, ready.epoch
        handoff = self._open.get(self._moved.get(source_id, source_id))
        if handoff is None:  # ended meanwhile; the engine pinned these blocks all the same
            return [Order(ReleaseBlocks(ready.key, ready.epoch))]
        assert ready.first_block <= handoff.num_announced, f"blocks before {ready.first_block} never came"
        handoff.num_prompt_tokens = ready.num_prompt_tokens
        handoff.num_prompt_blocks = -(-ready.num_prompt_tokens // self._geometry[0].block_size)
        num_known = handoff.num_announced - ready.first_block
        block_ids = ready.block_ids[num_known:]
        if block_ids:
            self._add_extent(handoff, block_ids, ready.written)
        return self._progressed(handoff.id)

    def _add_extent(self, handoff: _Handoff, block_ids: list[int], written: bool) -> None:
        layers_written = self._num_layers if written else 0
        extent = Extent(handoff.num_announced, block_ids, self._num_layers, layers_written)
        if handoff.target is not None:
            extent.aim(handoff.target)
        handoff.num_announced += len(block_ids)
        handoff.extents.append(extent)
        if not written:
            self._step.append(extent)
            self._step_ids.append(handoff.source_id)

    # --- from the runtime -------------------------------------------------------------------------

    def arm(self, event: Arm) -> list[PrefillEffect]:
        """The target is known; what is written already may be posted at once."""
        if event.id in self._ended:
            return []
        handoff = self._get_or_open(event.id)  # its PrefillOpened can still come
        if handoff.state is not PrefillState.COMPUTING:
            return []
        mapping = self._mappings.get(event.peer)
        if mapping is None:
            return self._stop(handoff, f"{event.peer} is not connected", "transport")
        handoff.state, handoff.target = PrefillState.PUSHING, Target.of(event, mapping)
        for extent in handoff.extents:
            extent.aim(handoff.target)
        return self._progressed(event.id)

    def retarget(self, event: Retarget) -> list[PrefillEffect]:
        """What was computed waits for another target, under a new epoch; the engine's pins stay as they are."""
        if self.knows(event.new_id):
            return []
        handoff = self._open.get(event.id)
        if handoff is None or handoff.state is not PrefillState.COMPUTING:
            self._ended[event.new_id] = None
            return [Tell(Quiesced(*event.new_id, "the prompt that was to be moved is over"))]
        del self._open[event.id]
        self._ended[event.id] = None
        handoff.id = event.new_id
        self._open[handoff.id] = handoff
        self._moved[handoff.source_id] = handoff.id
        return []

    def cancel(self, event: CancelHandoff) -> list[PrefillEffect]:
        """Post nothing more. Ended and unknown handoffs are quiet already, and stay so."""
        handoff = self._open.get(event.id)
        if handoff is None:
            self._ended[event.id] = None
            return [Tell(Quiesced(*event.id, event.reason))]
        return self._stop(handoff, event.reason, "cancelled")

    def fence(self, incarnation: str) -> list[PrefillEffect]:
        """That peer is dead: nothing that was posted to it can land, so nothing is waited for."""
        fenced = [h for h in self._open.values() if h.peer == incarnation]
        effects: list[PrefillEffect] = []
        for handoff in fenced:
            reason = f"decode worker {incarnation} is dead"
            effects += self._end(handoff, Quiesced(*handoff.id, reason, cause="fenced"))
        self._windows.fenced(incarnation)
        self._mappings.pop(incarnation, None)
        return effects

    # --- connections ------------------------------------------------------------------------------

    def introduce(self, peer: str, geometry: Sequence[KvGeometry]) -> KvMapping | Mismatch:
        """`peer`'s ranks, before anything is pushed to it."""
        mapping = map_kv(self._geometry, geometry)
        if isinstance(mapping, KvMapping):
            self._mappings[peer] = mapping
        return mapping

    def hold(self, peer: str) -> None:
        """Its connection is broken: post nothing to it until `resume`."""
        self._windows.hold(peer)

    def resume(self, peer: str) -> None:
        self._windows.resume(peer)

    def num_unfinished(self, peer: str) -> int:
        """Writes to `peer` that were posted and not seen to end."""
        return self._windows.num_writes(peer)

    def polled(self, now: float) -> list[PrefillEffect]:
        """Stop handoffs whose writes have not moved for STALL_S, and say so: waiting alone may never end them."""
        effects: list[PrefillEffect] = []
        for handoff in list(self._open.values()):
            waits = handoff.num_unfinished > 0 and not handoff.is_stalled
            if waits and now - handoff.moved_at >= STALL_S:
                handoff.is_stalled = True
                effects += [
                    Tell(Stalled(*handoff.id)),
                    *self._stop(handoff, "its writes do not end", "transport"),
                ]
        return effects

    # --- from the writes --------------------------------------------------------------------------

    def next_write(self, now: float) -> Write | None:
        """The write to post now, None if there is none. It counts as posted until it is reported to have ended."""
        byte_s = self._pacing.byte_s
        with_room = [peer for peer in self._postable if self._windows.has_room(peer, byte_s)]
        for handoff in sorted(self._waiting_for(with_room), key=lambda handoff: handoff.urgency):
            write = handoff.next_write(max_write_bytes(byte_s))
            if write is not None:
                handoff.num_unfinished += 1
                handoff.moved_at = now
                self._windows.posted(write.peer, write.num_bytes)
                return write
            self._unpost(handoff)
        return None

    def _waiting_for(self, peers: list[str]) -> list[_Handoff]:
        return [self._open[handoff_id] for peer in peers for handoff_id in self._postable[peer]]

    def write_posted(self, write: Write, post_s: float) -> None:
        """The call that posted `write` took so long."""
        self._pacing.write_posted(write.num_bytes, post_s)
        handoff = self._open[write.id]
        handoff.kv_bytes += write.num_bytes
        handoff.num_writes += 1
        handoff.post_s += post_s

    def write_done(self, write: Write, posted_at: float, done_at: float) -> list[PrefillEffect]:
        """`write`, whose post began at `posted_at`, was seen DONE."""
        own_s = self._pacing.write_done(write.num_bytes, posted_at, done_at)
        handoff = self._write_ended(write)
        if handoff is None:
            return []
        handoff.moved_at = done_at
        handoff.link_s += own_s
        return self._progressed(write.id)

    def write_failed(self, write: Write, reason: str) -> list[PrefillEffect]:
        """`write` was seen to fail, or could not be posted, while its peer is not known to be dead."""
        handoff = self._write_ended(write)
        if handoff is None:
            return []
        handoff.clean = False
        return self._stop(handoff, reason, "transport")

    def _write_ended(self, write: Write) -> _Handoff | None:
        self._windows.ended(write.peer, write.num_bytes)
        handoff = self._open.get(write.id)
        if handoff is None:  # fenced meanwhile
            return None
        assert handoff.num_unfinished > 0, "a write ended twice"
        handoff.num_unfinished -= 1
        return handoff

    def _get_or_open(self, handoff_id: HandoffId) -> _Handoff:
        handoff = self._open.get(handoff_id)
        if handoff is None:
            self._num_opened += 1
            handoff = self._open[handoff_id] = _Handoff(handoff_id, handoff_id, self._num_opened)
        return handoff

    def _unpost(self, handoff: _Handoff) -> None:
        """It has nothing to post, as things stand."""
        if handoff.peer is None:
            return
        waiting = self._postable.get(handoff.peer, set())
        waiting.discard(handoff.id)
        if not waiting:
            self._postable.pop(handoff.peer, None)

    # --- the ends of a handoff --------------------------------------------------------------------

    def _progressed(self, handoff_id: HandoffId) -> list[PrefillEffect]:
        """Something happened to this handoff: see what it may do now."""
        handoff = self._open.get(handoff_id)
        if handoff is None:
            return []
        match handoff.state:
            case PrefillState.COMPUTING:
                return []
            case PrefillState.PUSHING:
                return self._push_on(handoff)
            case PrefillState.CANCELLING:
                return [] if handoff.num_unfinished else self._quiesce(handoff)

    def _push_on(self, handoff: _Handoff) -> list[PrefillEffect]:
        assert handoff.target is not None
        arm = handoff.target.arm
        num_tokens, num_reserved = handoff.num_prompt_tokens, arm.num_tokens
        if num_tokens is not None and num_tokens != num_reserved:
            reason = f"the prompt has {num_tokens} tokens, decode reserved for {num_reserved}"
            return self._stop(handoff, reason, "mismatch")
        handoff.extents = [extent for extent in handoff.extents if not extent.is_over]
        if handoff.extents or handoff.num_unfinished or handoff.num_announced != handoff.num_prompt_blocks:
            if handoff.extents:
                self._postable.setdefault(arm.peer, set()).add(handoff.id)
            return []
        sent = Sent(*handoff.id, handoff.kv_bytes, handoff.num_writes, handoff.post_s, handoff.link_s)
        return self._end(handoff, sent)

    def _stop(self, handoff: _Handoff, reason: str, cause: Cause) -> list[PrefillEffect]:
        if handoff.state is not PrefillState.CANCELLING:
            handoff.state, handoff.reason, handoff.cause = PrefillState.CANCELLING, reason, cause
            self._unpost(handoff)
        return self._progressed(handoff.id)

    def _quiesce(self, handoff: _Handoff) -> list[PrefillEffect]:
        notice = encode_quiesced(*handoff.id, clean=handoff.clean)
        notify: list[PrefillEffect] = [Notify(handoff.peer, notice)] if handoff.peer is not None else []
        return notify + self._end(
            handoff, Quiesced(*handoff.id, handoff.reason, handoff.clean, handoff.cause)
        )

    def _end(self, handoff: _Handoff, message: Sent | Quiesced) -> list[PrefillEffect]:
        del self._open[handoff.id]
        self._unpost(handoff)
        self._moved.pop(handoff.source_id, None)
        self._ended[handoff.id] = None
        return [Order(ReleaseBlocks(*handoff.source_id)), Tell(message)]
