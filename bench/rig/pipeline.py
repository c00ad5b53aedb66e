"""What a layer-by-layer push could at best have hidden, from what was measured of a run."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from dynrt.transfer.trace import TraceEvent
from rig.engine_pair import Run


class Layers(msgspec.Struct, frozen=True):
    """One run's times in seconds.

    c: compute of a layer, mean. a: when in a layer its KV is written. h: the head's time. `ready`: of each layer of
    each chunk, when its KV was written, and how many bytes it brought.
    """

    c: float
    a: float
    h: float
    ready: list[tuple[float, int]]
    sampled_at: float

    def bound_s(self, bytes_per_s: float) -> float:
        """No implementation's exposed time can be below: the bytes of layer i exist from r_i, and cross one link.

        max(0, max_i(r_i + sum of the bytes from i on / rate) - end of prefill)
        """
        done_at, behind_s = 0.0, 0.0
        for written_at, num_bytes in reversed(self.ready):
            behind_s += num_bytes / bytes_per_s
            done_at = max(done_at, written_at + behind_s)
        return max(0.0, done_at - self.sampled_at)


class Write(msgspec.Struct, frozen=True):
    """One write as its sender saw it."""

    seconds: float  # its own: from its post, or from the end of the one before it
    num_bytes: int


def layers_of(trace: Sequence[TraceEvent], run: Run, layer_block_bytes: int) -> Layers:
    """From the prefill worker's trace."""
    own = [event for event in _during(trace, run) if event.kind in ("step", "written")]
    ready: list[tuple[float, int]] = []
    gaps: list[float] = []
    before = own[0]
    first_gaps: list[float] = []
    num_bytes = 0
    for event in own:
        if event.kind == "step":
            num_bytes = event.num_blocks * layer_block_bytes
        else:
            ready.append((event.at, num_bytes))
            (first_gaps if before.kind == "step" else gaps).append(event.at - before.at)
        before = event
    c = statistics.mean(gaps)
    a = min(c, statistics.mean(first_gaps))
    head_s = max(0.0, run.sampled_at - ready[-1][0] - (c - a))
    return Layers(c, a, head_s, ready, run.sampled_at)


def writes_of(trace: Sequence[TraceEvent], run: Run, layer_block_bytes: int) -> list[Write]:
    """The writes of one handoff, from the prefill worker's trace, in the order in which they ended."""
    posted: dict[tuple[int, int], list[float]] = {}
    writes, free_at = [], 0.0
    for event in trace:
        if event.key != run.key or event.kind not in ("posted", "done"):
            continue
        name = event.first_layer, event.num_blocks
        if event.kind == "posted":
            posted.setdefault(name, []).append(event.at)
            continue
        began_at = max(posted[name].pop(0), free_at)
        free_at = event.at
        writes.append(Write(event.at - began_at, event.num_layers * event.num_blocks * layer_block_bytes))
    return writes


def rate_of(writes: Sequence[Write]) -> float:
    """Bytes per second while the link was busy with these."""
    return sum(write.num_bytes for write in writes) / sum(write.seconds for write in writes)


def thread_cpu_s(trace: Sequence[TraceEvent], run: Run) -> float:
    """What the transfer thread used between its rests before and after a run."""
    assert run.received_at is not None
    rests = [event for event in trace if event.kind == "asleep"]
    before = max((event for event in rests if event.at < run.submitted_at), key=lambda event: event.at)
    after = min((event for event in rests if event.at > run.received_at), key=lambda event: event.at)
    return after.cpu_s - before.cpu_s


def _during(trace: Sequence[TraceEvent], run: Run) -> list[TraceEvent]:
    return [event for event in trace if run.submitted_at <= event.at <= run.sampled_at]
