"""What an engine and its vLLM connector share inside the compute thread: all of it but workers in other processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dynrt.engines.protocol import LayerHook
from dynrt.engines.scheduling.work import StepWork
from dynrt.engines.vllm.handoffs import Handoffs
from dynrt.engines.vllm.ranks import Ranks
from dynrt.transfer.local import BlocksReady


class NoHook:
    """Outside of a step nobody listens: vLLM runs the model to measure it and to warm it up."""

    def step_begins(self, ready: list[BlocksReady]) -> None:
        """Nothing."""

    def layer_written(self, layer: int, event: object | None) -> None:
        """Nothing."""


@dataclass
class StepSeen:
    """What vLLM's scheduler put into one step."""

    work: StepWork = field(default_factory=lambda: StepWork(0, 0, 0, 0))
    num_preempted: int = 0
    admitted: Mapping[str, int] = field(default_factory=dict)  # begun in it: tokens that were there already

    @property
    def num_tokens(self) -> int:
        return self.work.prefill_tokens + self.work.decode_requests


class Link:
    """The scheduler half sets `unpin` while vLLM builds it."""

    unpin: Callable[[Sequence[int]], None]

    def __init__(self, block_size: int, ranks: Ranks) -> None:
        self.ranks = ranks
        self.handoffs = Handoffs(block_size)
        self.hook: LayerHook = NoHook()
        self.step = StepSeen()
