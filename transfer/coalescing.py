"""How many layers go into one write: enough to pay for a send, few enough not to hold bytes back."""

from __future__ import annotations

EMPTY_WRITE_S = 100e-6  # the prior: what a write without bytes costs; NIXL over loopback, Python included
MAX_LAYER_GAP_S = 1.0  # a longer pause between two layers is a stalled process, not a layer

_MEMORY = 0.98  # weight of the past at each new write: the last fifty or so count
_LAYER_MEMORY = 0.75


def exposed_s(group: int, send_s: float, layer_s: float, transfer_s: float, num_layers: int) -> float:
    """Time from a prefill's end to its last byte, with `group` layers in one write.

    A write of g layers takes g·t + o; one can start every g·c. The last one starts when the last layer is written,
    or when the writes before it are through: g·t + o + (ceil(L/g) - 1) · max(0, g·t + o - g·c).
    """
    write_s = group * transfer_s + send_s
    backlog_s = max(0.0, write_s - group * layer_s)
    return write_s + (-(-num_layers // group) - 1) * backlog_s


def layers_per_push(send_s: float, layer_s: float, transfer_s: float, num_layers: int) -> int:
    """The group size of least exposed time: o cost of a send, c compute and t transfer time of a layer.

    Where a layer is computed slower than it travels this comes close to max(1, ceil(o / (c - t))), the smallest group
    without a backlog; for a short prompt it is all of `num_layers`, one piece. Ties go to the smaller group.
    """
    return min(
        range(1, num_layers + 1), key=lambda group: exposed_s(group, send_s, layer_s, transfer_s, num_layers)
    )


class WriteCost:
    """A write's duration as a fixed part and a part per byte: least squares over recent writes.

    One imaginary empty write of EMPTY_WRITE_S keeps the two parts apart while all writes have the same size.
    """

    def __init__(self) -> None:
        self._count = self._bytes = self._seconds = self._bytes_bytes = self._bytes_seconds = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        self._count = self._count * _MEMORY + 1
        self._bytes = self._bytes * _MEMORY + num_bytes
        self._seconds = self._seconds * _MEMORY + seconds
        self._bytes_bytes = self._bytes_bytes * _MEMORY + num_bytes * num_bytes
        self._bytes_seconds = self._bytes_seconds * _MEMORY + num_bytes * seconds

    def estimate(self) -> tuple[float, float]:
        """Seconds of an empty write, seconds per byte; neither below zero."""
        count, seconds = self._count + 1, self._seconds + EMPTY_WRITE_S
        spread = count * self._bytes_bytes - self._bytes * self._bytes
        if spread <= 0:
            return EMPTY_WRITE_S, 0.0
        per_byte = max(0.0, (count * self._bytes_seconds - self._bytes * seconds) / spread)
        return max(0.0, (seconds - per_byte * self._bytes) / count), per_byte


class Pacing:
    """Measures sends and layers as they happen and says how many layers to push at once."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._cost = WriteCost()
        self._layer_s: float | None = None  # None: no step measured yet
        self._last_layer: tuple[int, float] | None = None

    def layer_written(self, layer: int, now: float) -> None:
        """`layer` of some step was written at `now`."""
        if self._last_layer is not None and layer == self._last_layer[0] + 1:
            gap_s = min(MAX_LAYER_GAP_S, now - self._last_layer[1])
            past_s = gap_s if self._layer_s is None else self._layer_s
            self._layer_s = _LAYER_MEMORY * past_s + (1 - _LAYER_MEMORY) * gap_s
        self._last_layer = (layer, now)

    def write_done(self, num_bytes: int, seconds: float) -> None:
        """A write was seen DONE so long after its post began."""
        self._cost.observe(num_bytes, seconds)

    def layers_per_push(self, num_writes: int, layer_bytes: int) -> int:
        """For a step whose every layer brings `layer_bytes` in `num_writes` writes."""
        if self._layer_s is None:
            return 1
        send_s, byte_s = self._cost.estimate()
        return layers_per_push(num_writes * send_s, self._layer_s, layer_bytes * byte_s, self._num_layers)
