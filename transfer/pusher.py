"""Posts the writes that the prefill end chooses, and watches each to its end. Part of the transfer thread."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from dynrt.transfer import notifications
from dynrt.transfer.agent import Agent, NixlError, WriteState
from dynrt.transfer.checksums import KvChecksums
from dynrt.transfer.effects import PrefillEffect
from dynrt.transfer.prefill_end import PrefillEnd
from dynrt.transfer.trace import TransferTrace
from dynrt.transfer.write import Write


class _Posted(NamedTuple):
    """A write that was not seen to end."""

    write: Write
    handle: Any
    posted_at: float


class Pusher:
    """`checksums`: of the source memory, to be sent along; None: none are."""

    def __init__(
        self,
        prefill: PrefillEnd,
        agents: Sequence[Agent],
        checksums: KvChecksums | None,
        trace: TransferTrace | None,
    ) -> None:
        self._prefill = prefill
        self._agents = agents
        self._checksums = checksums
        self._trace = trace
        self._posted: list[_Posted] = []
        self.broken_peers: set[str] = set()  # a write to them failed; whoever deals with it takes them out

    @property
    def has_posted(self) -> bool:
        """Writes are unfinished."""
        return bool(self._posted)

    def post_next(self) -> list[PrefillEffect] | None:
        """Post one write; None if there is none to post."""
        write = self._prefill.next_write(time.monotonic())
        if write is None:
            return None
        began_at = time.monotonic()
        try:
            handle = self._post(write)
        except NixlError as error:
            return self._failed(write, str(error))
        self._prefill.write_posted(write, time.monotonic() - began_at)
        self._posted.append(_Posted(write, handle, began_at))
        if self._trace is not None:
            self._trace.moved("posted", write.id[0], write.units, began_at)
        return []

    def poll(self) -> list[PrefillEffect]:
        """See which writes have ended."""
        effects: list[PrefillEffect] = []
        posted, self._posted = self._posted, []
        for item in posted:
            agent = self._agents[item.write.source_rank]
            state = agent.poll_write(item.handle)
            if state is WriteState.IN_FLIGHT:
                self._posted.append(item)
                continue
            agent.release_write(item.handle)
            effects += self._ended(item, state)
        return effects

    def let_go(self, incarnation: str) -> None:
        """That peer is dead: its writes are waited for no more."""
        for item in self._posted:
            if item.write.peer == incarnation:
                self._agents[item.write.source_rank].release_write(item.handle)
        self._posted = [item for item in self._posted if item.write.peer != incarnation]
        self.broken_peers.discard(incarnation)

    def _post(self, write: Write) -> Any:
        units, checksums = write.units, list[int]()
        if self._checksums is not None:
            checksums = self._checksums.of_units(write.route.source, units, write.source_pieces)
        notification = notifications.encode_written(*write.id, units, checksums)
        return self._agents[write.source_rank].post_write(write, notification)

    def _ended(self, item: _Posted, state: WriteState) -> list[PrefillEffect]:
        if state is WriteState.FAILED:
            return self._failed(item.write, f"a write to {item.write.peer} failed")
        done_at = time.monotonic()
        if self._trace is not None:
            self._trace.moved("done", item.write.id[0], item.write.units, done_at)
        return self._prefill.write_done(item.write, item.posted_at, done_at)

    def _failed(self, write: Write, reason: str) -> list[PrefillEffect]:
        self.broken_peers.add(write.peer)
        return self._prefill.write_failed(write, reason)
