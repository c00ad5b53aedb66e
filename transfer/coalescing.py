"""How many layers go into one write: enough to pay for a send, few enough not to hold bytes back."""

from __future__ import annotations

EMPTY_WRITE_S = 100e-6  # the prior: what a write without bytes costs; NIXL over loopback, Python included
WAKE_S = 0.1e-3  # what a write costs beside its post: waking the thread, and the interpreter that it takes from compute
MAX_LAYER_GAP_S = 1.0  # a longer pause between two layers is a stalled process, not a layer

SLACK_SHARE = 0.25  # of the time that is left of a layer behind its KV: it varies

_MEMORY = 0.98  # weight of the past at each new observation: the last fifty or so count


def exposed_s(
    group: int, send_s: float, layer_s: float, transfer_s: float, num_layers: int, post_s: float = 0.0
) -> float:
    """Time from a prefill's end to its last byte, with `group` layers in one write.

    A write of g layers takes g·t + o; one can start every g·c + p, as each post takes p from compute. The last one
    starts when the last layer is written, or when the writes before it are through:
    g·t + o + (ceil(L/g) - 1) · max(0, g·t + o - g·c - p).
    """
    write_s = group * transfer_s + send_s
    backlog_s = max(0.0, write_s - group * layer_s - post_s)
    return write_s + (-(-num_layers // group) - 1) * backlog_s


def layers_per_push(
    send_s: float,
    layer_s: float,
    transfer_s: float,
    num_layers: int,
    slack_s: float = 0.0,
    post_s: float = 0.0,
) -> int:
    """The group size of least cost: o cost of a send, c compute and t transfer time of a layer.

    `slack_s`: how long after its last layer was written a prefill still computes; what is exposed for less than that
    is hidden. `post_s`: what each send but the first takes from compute, where they share cores or an interpreter;
    over a link that falls behind it costs nothing, as the link then ends as late.
    Without these two it comes close to max(1, ceil(o / (c - t))) where a layer is computed slower than it travels; for
    a short prompt it is all of `num_layers`, one piece. Ties go to the smaller group.
    """

    def cost_s(group: int) -> float:
        exposed = exposed_s(group, send_s, layer_s, transfer_s, num_layers, post_s)
        return max(0.0, exposed - slack_s) + (-(-num_layers // group) - 1) * post_s

    return min(range(1, num_layers + 1), key=cost_s)


class LinearFit:
    """Durations as a fixed part and a part per size: least squares over the last fifty or so.

    One imaginary observation of size 0 keeps the two parts apart while all real ones have the same size.
    """

    def __init__(self, assumed_fixed_s: float) -> None:
        self._assumed_fixed_s = assumed_fixed_s
        self._count = self._sizes = self._seconds = self._sizes_sizes = self._sizes_seconds = 0.0

    def observe(self, size: float, seconds: float) -> None:
        self._count = self._count * _MEMORY + 1
        self._sizes = self._sizes * _MEMORY + size
        self._seconds = self._seconds * _MEMORY + seconds
        self._sizes_sizes = self._sizes_sizes * _MEMORY + size * size
        self._sizes_seconds = self._sizes_seconds * _MEMORY + size * seconds

    def at(self, size: float) -> float:
        """Seconds of that size."""
        fixed_s, per_size = self.estimate()
        return fixed_s + size * per_size

    def estimate(self) -> tuple[float, float]:
        """Seconds of size 0, seconds per unit of size; neither below zero."""
        count, seconds = self._count + 1, self._seconds + self._assumed_fixed_s
        spread = count * self._sizes_sizes - self._sizes * self._sizes
        if spread <= 0:
            return self._assumed_fixed_s, 0.0
        per_size = max(0.0, (count * self._sizes_seconds - self._sizes * seconds) / spread)
        return max(0.0, (seconds - per_size * self._sizes) / count), per_size


class Pacing:
    """Measures writes and layers as they happen, and says how many layers to push at once.

    A write's own time begins when the one before it is through: while a link is busy, what was posted only queues.
    Only writes that queued show what a write costs the link beside its bytes: the others' times hold, too, how long it
    takes to notice that one is through. A layer's time depends on how many blocks its step completes.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._write = LinearFit(EMPTY_WRITE_S)
        self._queued_write = LinearFit(EMPTY_WRITE_S)
        self._post = LinearFit(EMPTY_WRITE_S)
        self._layer = LinearFit(0.0)
        self._writing = LinearFit(0.0)  # from a layer's begin to its KV
        self._num_blocks = 0  # of the current step
        self._step_began_at = 0.0
        self._last_layer: tuple[int, float] | None = None
        self._has_layers = False
        self._link_free_at = float("-inf")

    @property
    def byte_s(self) -> float:
        """Seconds that a byte takes; 0 while nothing was measured."""
        return self._write.estimate()[1]

    def step_begins(self, num_blocks: int, now: float) -> None:
        """The layers that follow are of a step that completes so many blocks."""
        self._num_blocks, self._last_layer = num_blocks, None
        self._step_began_at = now

    def layer_written(self, layer: int, now: float) -> None:
        """`layer` of the current step was written at `now`."""
        if self._last_layer is not None and layer == self._last_layer[0] + 1:
            self._layer.observe(self._num_blocks, min(MAX_LAYER_GAP_S, now - self._last_layer[1]))
            self._has_layers = True
        elif layer == 0:
            self._writing.observe(self._num_blocks, min(MAX_LAYER_GAP_S, now - self._step_began_at))
        self._last_layer = (layer, now)

    def write_posted(self, num_bytes: int, seconds: float) -> None:
        """The call that posted a write took so long."""
        self._post.observe(num_bytes, seconds)

    def write_done(self, num_bytes: int, posted_at: float, done_at: float) -> float:
        """A write was seen DONE; its own time."""
        seconds = max(0.0, done_at - max(posted_at, self._link_free_at))
        if posted_at < self._link_free_at:
            self._queued_write.observe(num_bytes, seconds)
        self._write.observe(num_bytes, seconds)
        self._link_free_at = max(self._link_free_at, done_at)
        return seconds

    def layers_per_push(self, num_writes: int, num_blocks: int, layer_bytes: int) -> int:
        """For a step that completes `num_blocks`, `layer_bytes` in each layer, in `num_writes` writes."""
        if not self._has_layers:
            return 1
        send_s, _ = self._queued_write.estimate()
        layer_s = self._layer.at(num_blocks)
        slack_s = SLACK_SHARE * max(0.0, layer_s - self._writing.at(num_blocks))
        post_s = WAKE_S + num_writes * self._post.estimate()[0]
        return layers_per_push(
            num_writes * send_s, layer_s, layer_bytes * self.byte_s, self._num_layers, slack_s, post_s
        )
