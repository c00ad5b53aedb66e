"""The connector's worker half: what it tells of the KV that it writes, and to whom."""

from __future__ import annotations

import glob
import logging
import os
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from dynrt.engines.interpreter import share_interpreter
from dynrt.engines.vllm.environment import join_logs
from dynrt.engines.vllm.layout import CacheLayout
from dynrt.engines.vllm.link import Link
from dynrt.engines.vllm.ranks import OneRank, StepMetadata
from dynrt.runtime.logs import set_up_logs
from dynrt.transfer.ranks.server import RankServer

log = logging.getLogger("dynrt.engine")


class WorkerHalf(Protocol):
    """One for each of vLLM's workers."""

    @property
    def grows(self) -> bool:
        """Whether this step writes blocks that were announced."""

    def register(self, layout: CacheLayout, rank: int) -> None: ...

    def begin_step(self, metadata: StepMetadata) -> None: ...

    def layer_written(self, layer: int, event: torch.cuda.Event | None) -> None: ...


class OwnWorkerHalf:
    """In the engine's process: the hook is called from here."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._grows = False

    @property
    def grows(self) -> bool:
        return self._grows

    def register(self, layout: CacheLayout, rank: int) -> None:
        assert isinstance(self._link.ranks, OneRank) and rank == 0
        self._link.ranks.layout = layout

    def begin_step(self, metadata: StepMetadata) -> None:
        self._grows = any(not blocks.written for blocks in metadata.ready)
        if metadata.ready:
            self._link.hook.step_begins(metadata.ready)

    def layer_written(self, layer: int, event: torch.cuda.Event | None) -> None:
        self._link.hook.layer_written(layer, event)


class RankWorkerHalf:
    """In a rank's own process: its server tells the engine, and runs the agent for it."""

    _server: RankServer

    def __init__(self, socket_path: str) -> None:
        set_up_logs()
        join_logs()
        share_interpreter()  # vLLM's processes await each other in busy loops
        self._socket_path = socket_path
        self._step: int | None = None

    @property
    def grows(self) -> bool:
        return self._step is not None

    def register(self, layout: CacheLayout, rank: int) -> None:
        enter = partial(_enter_device, layout.regions[0].device)
        self._server = RankServer(self._socket_path, rank, layout.geometry, layout.regions, enter)
        self._server.start()
        log.info("rank is up", extra={"rank": rank, "pid": os.getpid()})
        _unlink_shared_memory()

    def begin_step(self, metadata: StepMetadata) -> None:
        self._step = metadata.step

    def layer_written(self, layer: int, event: torch.cuda.Event | None) -> None:
        assert self._step is not None
        self._server.layer_written(self._step, layer, event)


def _unlink_shared_memory() -> None:
    """vLLM 0.32 never removes what its ranks on a CPU reduce over, 4 MB each; all have it mapped by now."""
    identity = os.environ.get("VLLM_DIST_IDENT")
    if identity is not None:
        for segment in Path("/dev/shm").glob(f"{glob.escape(identity)}-*"):
            segment.unlink(missing_ok=True)


def _enter_device(device: int | None) -> None:
    """CUDA keeps the current device by thread, and UCX registers memory in the context of the current one."""
    if device is not None:
        torch.cuda.set_device(device)
