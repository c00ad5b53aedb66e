"""Faults injected between the transfer thread and NIXL. For tests: nothing sets them in a served runtime."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dynrt.transfer.agent import Agent, NixlError, WriteState
from dynrt.transfer.deferring import DeferredWrite, DeferringAgent
from dynrt.transfer.write import Write

REORDER_S = 0.05  # how long a write is held back for a later one to overtake it

FaultKind = Literal["delay", "stall", "reorder", "refuse", "fail", "drop", "corrupt"]


class Fault(msgspec.Struct, frozen=True):
    """What happens to writes number `first`, `first + every`, … of an agent, `limit` of them (None: all).

    delay: posted `seconds` later. stall: never posted. reorder: the next one overtakes it. refuse: the post raises.
    fail: it is reported to have failed, as by a connection that broke. drop: it lands, but its completion is never
    seen. corrupt: other blocks' bytes are sent.
    """

    kind: FaultKind
    first: int = 0
    every: int = 1
    limit: int | None = None
    seconds: float = 0.0

    def hits(self, number: int) -> bool:
        """Whether the agent's write of that number, counted from 0, meets this fault."""
        index, off = divmod(number - self.first, self.every)
        return index >= 0 and off == 0 and (self.limit is None or index < self.limit)


class FaultyWrite(DeferredWrite):
    """A write and what it meets."""

    kind: FaultKind | None = None


class FaultyAgent(DeferringAgent):
    """An Agent that lets some writes meet a fault."""

    def __init__(self, inner: Agent, faults: Sequence[Fault], num_blocks: int) -> None:
        super().__init__(inner)
        self._faults = faults
        self._num_blocks = num_blocks
        self._number = 0  # of the write to be posted next
        self._overtaken: list[DeferredWrite] = []

    def post_write(self, write: Write, notification: bytes) -> Any:
        fault = next((fault for fault in self._faults if fault.hits(self._number)), None)
        self._number += 1
        kind = None if fault is None else fault.kind
        if kind == "refuse":
            raise NixlError(f"write to {write.peer}: an injected fault")
        if kind == "corrupt":
            others = [(piece + 1) % self._num_blocks for piece in write.source_pieces]
            write = msgspec.structs.replace(write, source_pieces=others)
        due_at = 0.0 if fault is None else _due_at(fault, time.monotonic())
        faulty = FaultyWrite(due_at, write, notification)
        faulty.kind, faulty.has_failed = kind, kind == "fail"
        self._let_overtake(faulty)
        return faulty

    def poll_write(self, handle: Any) -> WriteState:
        state = super().poll_write(handle)
        if state is WriteState.DONE and handle.kind == "drop":
            return WriteState.IN_FLIGHT
        return state

    def _let_overtake(self, write: FaultyWrite) -> None:
        """Post `write` before those that it overtakes; or keep it for the next one."""
        if write.kind == "reorder":
            self._overtaken.append(write)
            return
        if write.due_at == 0.0 and not write.has_failed:
            self.post_now(write)
        for earlier in self._overtaken:
            earlier.due_at = 0.0  # at its next poll
        self._overtaken.clear()


def _due_at(fault: Fault, now: float) -> float:
    match fault.kind:
        case "delay":
            return now + fault.seconds
        case "reorder":
            return now + REORDER_S
        case "stall":
            return float("inf")
    return 0.0
