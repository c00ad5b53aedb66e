"""vLLM's own NixlConnector, watched: what its scheduler puts into each step, and how large the cache is.

All else is vLLM's: which blocks are held for whom and for how long, who reads them, what becomes of a failed read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlHandshakePayload
from vllm.platforms import current_platform
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig

from dynrt.engines.vllm.connector import link_of, seen_in
from dynrt.engines.vllm.layout import unmapped_geometry_of
from dynrt.engines.vllm.ranks import UnseenRanks


class PullConnector(NixlPullConnector):
    """See the module."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        with _cores_left_alone() if current_platform.is_cpu() else nullcontext():
            super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            self._link = link_of(vllm_config)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """To the scheduler's half, when all ranks have their caches: what they will tell each other's like."""
        super().set_xfer_handshake_metadata_pp_aware(metadata)
        payloads = [payload for payload in metadata.values() if isinstance(payload, NixlHandshakePayload)]
        assert isinstance(self._link.ranks, UnseenRanks) and len(payloads) == len(metadata)
        self._link.ranks.geometry = [
            unmapped_geometry_of(self._kv_cache_config, payload.compatibility_hash) for payload in payloads
        ]

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._link.step = seen_in(scheduler_output)
        return super().build_connector_meta(scheduler_output)


@contextmanager
def _cores_left_alone() -> Iterator[None]:
    """Here vLLM would bind the thread that computes to a core kept for transfers, the same one in all engines of a
    host, and NIXL's progress thread would take most of another; it is not needed, as every step asks NIXL for news."""
    cores, make_config = os.sched_getaffinity(0), base_worker.nixl_agent_config
    base_worker.nixl_agent_config = partial(make_config, enable_prog_thread=False)
    try:
        yield
    finally:
        base_worker.nixl_agent_config = make_config
        os.sched_setaffinity(0, cores)
