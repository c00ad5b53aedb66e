"""The connector that vLLM loads: it translates between vLLM's hooks and our engine, and decides nothing itself.

vLLM builds it for its scheduler, and for each of its workers, which may be processes of their own. Nothing here polls,
waits or calls NIXL: that is the transfer thread's. On CUDA each layer comes with an event recorded behind its KV write,
and vLLM is asked for piecewise graphs, between whose pieces these hooks run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request

from dynrt.engines.scheduling.work import StepWork
from dynrt.engines.vllm.layout import layout_of
from dynrt.engines.vllm.link import Link, StepSeen
from dynrt.engines.vllm.ranks import SOCKET_KEY, StepMetadata
from dynrt.engines.vllm.workers import OwnWorkerHalf, RankWorkerHalf, WorkerHalf
from dynrt.transfer.local import BlocksReady

if TYPE_CHECKING:
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata

LINK_KEY = "dynrt_link"
_links: dict[str, Link] = {}  # vLLM passes a connector what its configuration holds: a name, no object


def publish_link(name: str, link: Link) -> None:
    """Connectors whose `kv_connector_extra_config` names it by LINK_KEY belong to this engine."""
    _links[name] = link


def link_of(vllm_config: VllmConfig) -> Link:
    """Of the engine that these connectors belong to."""
    assert vllm_config.kv_transfer_config is not None
    return _links[vllm_config.kv_transfer_config.kv_connector_extra_config[LINK_KEY]]


class DynrtConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        settings = self._kv_transfer_config.kv_connector_extra_config
        self._worker: WorkerHalf
        if role is KVConnectorRole.WORKER and SOCKET_KEY in settings:
            self._worker = RankWorkerHalf(settings[SOCKET_KEY])
            return
        self._link = link_of(vllm_config)
        self._worker = OwnWorkerHalf(self._link)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        return True

    # --- scheduler's half -------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool
        self._link.unpin = self._unpin

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        num_tokens = self._link.handoffs.tokens_to_load(request.request_id, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            (block_ids,) = blocks.get_block_ids()
            self._link.handoffs.allocated(request.request_id, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        self._link.step = seen_in(scheduler_output)
        chunks = list(_chunks(scheduler_output))
        tables = scheduler_output.kv_connector_block_state
        assert tables is not None
        handoffs = self._link.handoffs
        if not handoffs.is_prefilling:
            return StepMetadata()
        blocks_of = {name: tables.get_block_ids(name)[0] for name, _start, _end in chunks}
        growing = {
            block_id
            for name, start, end in chunks
            for block_id in handoffs.touched(start, end, blocks_of[name])
        }
        ready: list[BlocksReady] = []
        for name, start, end in chunks:
            ready += handoffs.announce(name, start, end, blocks_of[name], growing)
        for blocks in ready:
            self._pool.touch([self._pool.blocks[block_id] for block_id in blocks.block_ids])
        return self._link.ranks.begin_step(ready, self._link.hook)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None  # announced blocks are pinned apart from the request that wrote them

    def _unpin(self, block_ids: Sequence[int]) -> None:
        self._pool.free_blocks(self._pool.blocks[block_id] for block_id in reversed(block_ids))

    # --- worker's half ----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._layout = layout_of(self._vllm_config, self._kv_cache_config, kv_caches)
        self._worker.register(self._layout, self._vllm_config.parallel_config.rank)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        self._worker.begin_step(connector_metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        if self._worker.grows and self._layout.is_written_early:
            self._tell_written(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        if self._worker.grows and not self._layout.is_written_early:
            self._tell_written(layer_name)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Loads are the transfer thread's."""

    def wait_for_save(self) -> None:
        """So are saves."""

    def _tell_written(self, layer_name: str) -> None:
        layer = self._layout.layers[layer_name]
        device = self._layout.regions[layer].device
        self._worker.layer_written(layer, None if device is None else _event_on(device))


def _event_on(device: int) -> torch.cuda.Event:
    """Happens when what was asked of this GPU so far is done."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


def seen_in(output: SchedulerOutput) -> StepSeen:
    """What vLLM's scheduler put into a step."""
    return StepSeen(
        StepWork.of_spans([(start, end) for _name, start, end in _chunks(output)]),
        num_preempted=len(output.preempted_req_ids or ()),
        admitted={new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs},
    )


def _chunks(output: SchedulerOutput) -> Iterator[tuple[str, int, int]]:
    """Of each request of a step: its name, and the first and the end of the tokens that are computed."""
    starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    starts |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for name, num_tokens in output.num_scheduled_tokens.items():
        yield name, starts[name], starts[name] + num_tokens
