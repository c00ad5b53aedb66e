"""A trace of one transfer thread: when each layer was written, pushed and received. For benches and puzzles."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import IO, Literal

import msgspec

from dynrt.transfer.units import UnitRange

FLUSH_EVENTS = 100_000  # kept in memory at most; written out when the thread is about to sleep

Kind = Literal["step", "written", "posted", "done", "received", "asleep"]


class TraceEvent(msgspec.Struct, frozen=True):
    """`at`: CLOCK_MONOTONIC seconds. Layers are `first_layer … first_layer + num_layers - 1`.

    step: a step with blocks to push began; written: a layer's KV is in the cache (both: in whatever handoffs take
    part); posted, done: a write; received: its notification was read by the decode end; asleep: the thread has
    nothing to do and has used `cpu_s` so far.
    """

    at: float
    kind: Kind
    key: str = ""  # of the handoff, in hex
    first_layer: int = 0
    num_layers: int = 0
    num_blocks: int = 0  # step: that it completes; else pieces, which are blocks between alike workers
    cpu_s: float = 0.0


class TransferTrace:
    """Appends events to a file, one JSON object a line. Recording costs no I/O."""

    def __init__(self, path: Path) -> None:
        self._file: IO[bytes] = path.open("wb")
        self._events: list[TraceEvent] = []

    def step(self, num_blocks: int, at: float) -> None:
        self._add(TraceEvent(at, "step", num_blocks=num_blocks))

    def asleep(self, at: float, cpu_s: float) -> None:
        self._add(TraceEvent(at, "asleep", cpu_s=cpu_s))
        self.flush()

    def written(self, layer: int, at: float) -> None:
        self._add(TraceEvent(at, "written", first_layer=layer, num_layers=1))

    def moved(
        self, kind: Literal["posted", "done", "received"], key: bytes, units: UnitRange, at: float
    ) -> None:
        self._add(TraceEvent(at, kind, key.hex(), units.first_layer, units.num_layers, units.num_pieces))

    def flush(self) -> None:
        if self._events:
            self._file.write(msgspec.json.Encoder().encode_lines(self._events))
            self._file.flush()
            self._events.clear()

    def close(self) -> None:
        self.flush()
        self._file.close()

    def _add(self, event: TraceEvent) -> None:
        self._events.append(event)
        if len(self._events) >= FLUSH_EVENTS:
            self.flush()


def read_trace(path: Path) -> list[TraceEvent]:
    """What a TransferTrace wrote, in order of time."""
    events: Iterable[TraceEvent] = msgspec.json.Decoder(TraceEvent).decode_lines(path.read_bytes())
    return sorted(events, key=lambda event: event.at)
