"""The handoffs of one vLLM engine: which blocks are announced and pinned, which are reserved (sans-IO).

Requests go by vLLM's own ids here; what comes out names them by (key, epoch).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from dynrt.engines.protocol import Reservation
from dynrt.transfer.local import BlocksReady

RequestId = tuple[bytes, int]  # (key, epoch)


@dataclass
class _Prefill:
    """A prompt computed here for a decode worker elsewhere."""

    id: RequestId
    num_tokens: int
    num_announced: int = 0  # leading blocks
    pinned: list[int] = field(default_factory=list)


@dataclass
class _Receive:
    """A prompt whose KV is pushed here. Its blocks are not allocated until `made` is there."""

    num_tokens: int
    made: Reservation | None = None
    is_taken: bool = False


class Handoffs:
    """What the engine orders on one side, and what vLLM's scheduler asks and tells on the other."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prefills: dict[str, _Prefill] = {}
        self._prefill_names: dict[RequestId, str] = {}
        self._receives: dict[str, _Receive] = {}

    # --- prefill end ------------------------------------------------------------------------------

    def open_prefill(self, name: str, request_id: RequestId, num_tokens: int) -> None:
        self._prefills[name] = _Prefill(request_id, num_tokens)
        self._prefill_names[request_id] = name

    def announce(
        self, name: str, start: int, end: int, block_ids: Sequence[int], growing: Collection[int]
    ) -> list[BlocksReady]:
        """Tokens [start, end) are computed in this step: blocks written before, then those that it completes.

        `growing`: the blocks that this step writes to, for whatever request. A prefix hit may be among them: vLLM
        lets a request find what another one computes in the same step. The caller pins what is announced. After a
        preemption, what was announced before is not announced again.
        """
        prefill = self._prefills.get(name)
        if prefill is None:
            return []
        num_blocks = self._blocks_for(prefill.num_tokens)
        before = block_ids[: start // self._block_size]
        num_written = next((n for n, block_id in enumerate(before) if block_id in growing), len(before))
        num_completed = num_blocks if end >= prefill.num_tokens else end // self._block_size
        ready = []
        for num_ready, written in ((num_written, True), (num_completed, False)):
            first_block = prefill.num_announced
            ids = list(block_ids[first_block:num_ready])
            if ids:
                ready.append(BlocksReady(*prefill.id, first_block, ids, written, prefill.num_tokens))
                prefill.pinned += ids
                prefill.num_announced = num_ready
        return ready

    def close_prefill(self, request_id: RequestId) -> list[int]:
        """Nothing more is announced; the blocks to unpin, in the order of the prompt. Unknown: none."""
        name = self._prefill_names.pop(request_id, None)
        return [] if name is None else self._prefills.pop(name).pinned

    @property
    def is_prefilling(self) -> bool:
        """Whether anything could be announced."""
        return bool(self._prefills)

    def has_pins(self, request_id: RequestId) -> bool:
        """Whether something was announced that is not unpinned yet."""
        name = self._prefill_names.get(request_id)
        return name is not None and bool(self._prefills[name].pinned)

    # --- decode end -------------------------------------------------------------------------------

    @property
    def num_receiving(self) -> int:
        return len(self._receives)

    @property
    def num_reserved(self) -> int:
        """Of those, how many have their blocks: vLLM computes nothing for them."""
        return sum(receive.made is not None for receive in self._receives.values())

    @property
    def has_untaken(self) -> bool:
        """A reservation was made that nobody took yet."""
        return any(receive.made is not None and not receive.is_taken for receive in self._receives.values())

    def open_receive(self, name: str, num_tokens: int) -> None:
        self._receives[name] = _Receive(num_tokens)

    def tokens_to_load(self, name: str, num_cached: int) -> int:
        """How many tokens behind its own prefix hit a request waits for; 0 for one that is computed here."""
        receive = self._receives.get(name)
        return 0 if receive is None else receive.num_tokens - num_cached

    def allocated(self, name: str, block_ids: Sequence[int], num_to_load: int) -> None:
        """All blocks of a request that loads its last `num_to_load` tokens."""
        receive = self._receives[name]
        first_block = (receive.num_tokens - num_to_load) // self._block_size
        reserved = list(block_ids[first_block : self._blocks_for(receive.num_tokens)])
        receive.made = Reservation(first_block, reserved)

    def take_reservation(self, name: str) -> Reservation | None:
        """What was allocated; None if nothing was yet."""
        receive = self._receives[name]
        receive.is_taken = receive.made is not None
        return receive.made

    def is_receiving(self, name: str) -> bool:
        """Whether its blocks are still to be filled, or even to be allocated."""
        return name in self._receives

    def is_reserved(self, name: str) -> bool:
        """Whether its reservation was taken: then only a commit or a release ends it."""
        receive = self._receives.get(name)
        return receive is not None and receive.is_taken

    def close_receive(self, name: str) -> bool:
        """Nothing is loaded for it any more: it is complete, or given up. Whether vLLM holds blocks for it by now."""
        receive = self._receives.pop(name, None)
        return receive is not None and receive.made is not None

    def touched(self, start: int, end: int, block_ids: Sequence[int]) -> Sequence[int]:
        """Of a request's blocks, those that tokens [start, end) are written to."""
        return block_ids[start // self._block_size : self._blocks_for(end)]

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
