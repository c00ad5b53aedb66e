"""The engine's side of vLLM's workers: one in its own process, or one process for each rank of tensor parallel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from dynrt.engines.protocol import LayerHook
from dynrt.engines.vllm.layout import CacheLayout
from dynrt.transfer.layout import KvGeometry
from dynrt.transfer.local import BlocksReady
from dynrt.transfer.memory import RankMemory
from dynrt.transfer.ranks.listener import RankListener
from dynrt.transfer.ranks.remote import RemoteRank, StepLayer

SOCKET_KEY = "dynrt_ranks"
COME_LIMIT_S = 30.0  # they come before vLLM says that it is loaded


@dataclass
class StepMetadata(KVConnectorMetadata):
    """From the connector's scheduler half to its worker half, wherever that is."""

    ready: list[BlocksReady] = field(default_factory=list)  # to be announced by the worker half
    step: int | None = None  # number of a step whose layers are told by rank processes; None: nobody asks


class OneRank:
    """vLLM's worker runs in the compute thread, and its half of the connector calls the hook itself."""

    layout: CacheLayout  # set by the worker half

    @property
    def settings(self) -> dict[str, Any]:
        """What the worker half must know."""
        return {}

    @property
    def geometry(self) -> list[KvGeometry]:
        return [self.layout.geometry]

    @property
    def memory(self) -> Sequence[RankMemory]:
        return [self.layout.regions]

    def await_all(self) -> None:
        """Nothing: vLLM builds it."""

    def begin_step(self, ready: list[BlocksReady], hook: LayerHook) -> StepMetadata:
        return StepMetadata(ready)

    def close(self) -> None:
        """Nothing is open."""


class RankProcesses:
    """vLLM's workers are processes; each has a transfer.ranks.server.RankServer beside its KV memory.

    A step's layers are all told to the hook when the step is scheduled, each with an event that happens when every rank
    has written its part: as on CUDA, the transfer thread waits for it.
    """

    def __init__(self, num_ranks: int) -> None:
        self._listener = RankListener(num_ranks)
        self._ranks: list[RemoteRank] = []
        self._num_steps = 0

    @property
    def settings(self) -> dict[str, Any]:
        return {SOCKET_KEY: self._listener.path}

    @property
    def geometry(self) -> list[KvGeometry]:
        return [rank.geometry for rank in self._ranks]

    @property
    def memory(self) -> Sequence[RankMemory]:
        return self._ranks

    def await_all(self) -> None:
        """Raises RankLostError."""
        self._ranks = self._listener.accept_all(COME_LIMIT_S)

    def begin_step(self, ready: list[BlocksReady], hook: LayerHook) -> StepMetadata:
        if ready:
            hook.step_begins(ready)
        if all(blocks.written for blocks in ready):
            return StepMetadata()
        self._num_steps += 1
        for layer in range(self._ranks[0].geometry.num_layers):
            hook.layer_written(layer, StepLayer(self._ranks, self._num_steps, layer))
        return StepMetadata(step=self._num_steps)

    def close(self) -> None:
        """No rank can come any more."""
        self._listener.close()


class UnseenRanks:
    """vLLM's own connector works on every rank, wherever that is: nothing here knows more than the caches' sizes."""

    geometry: list[KvGeometry]  # set by the scheduler half
    settings: dict[str, Any]
    memory: Sequence[RankMemory]

    def __init__(self) -> None:
        self.settings = {}
        self.memory = []

    def await_all(self) -> None:
        """Nothing comes."""

    def begin_step(self, ready: list[BlocksReady], hook: LayerHook) -> StepMetadata:
        raise AssertionError("nothing is announced of blocks that vLLM's own connector moves")

    def close(self) -> None:
        """Nothing is open."""


Ranks = OneRank | RankProcesses | UnseenRanks


def ranks_of(tensor_parallel_size: int) -> OneRank | RankProcesses:
    return OneRank() if tensor_parallel_size == 1 else RankProcesses(tensor_parallel_size)
