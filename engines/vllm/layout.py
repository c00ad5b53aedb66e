"""vLLM's KV cache as our geometry and regions; what is not known here is refused, not guessed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

from dynrt.runtime.errors import ConfigError
from dynrt.transfer.layout import DTYPE_BYTES, KvGeometry, KvRegion

# Axes of one layer's tensor by vLLM's names for its layouts: block, head, token (N), content. FLASH_ATTN's content
# is the key and then the value. CPU_ATTN packs keys and values of a head's block in the order of its instruction set.
_FLASH_ORDERS = {"LBHNC": "block,head,token,kv,dim", "LBNHC": "block,token,head,kv,dim"}


class CacheLayout(msgspec.Struct, frozen=True):
    """One rank's KV cache. `layers`: position by vLLM's name, in the order in which they are computed."""

    geometry: KvGeometry
    regions: list[KvRegion]
    layers: dict[str, int]
    is_written_early: bool  # a layer's KV is in the cache before its attention is entered


def layout_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, kv_caches: Mapping[str, torch.Tensor]
) -> CacheLayout:
    """Raises ConfigError, naming what it found, for a cache that is not one plain tensor per layer."""
    spec = _spec(kv_cache_config)
    names = sorted(kv_caches, key=extract_layer_index)
    tensors = [kv_caches[name] for name in names]
    modules = [vllm_config.compilation_config.static_forward_context[name] for name in names]
    geometry = KvGeometry(
        num_layers=len(names),
        num_blocks=kv_cache_config.num_blocks,
        block_size=spec.block_size,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=_dtype(spec),
        order=_order(modules[0], kv_cache_config.kv_cache_layout),
        first_head=_first_head(vllm_config),
        total_kv_heads=vllm_config.model_config.get_total_num_kv_heads(),
    )
    for name, tensor in zip(names, tensors, strict=True):
        _check_tensor(name, tensor, geometry)
    return CacheLayout(
        geometry,
        [KvRegion(tensor.data_ptr(), _num_bytes(geometry), tensor.device.index) for tensor in tensors],
        {name: layer for layer, name in enumerate(names)},
        not any(module.attn_backend.forward_includes_kv_cache_update for module in modules),
    )


def unmapped_geometry_of(kv_cache_config: KVCacheConfig, compatibility_hash: str) -> KvGeometry:
    """Of a rank's cache that vLLM's own connector moves, whatever it is made of: its size, for the planner.

    As if a token's bytes were one head's key and value in elements of two bytes. Its order is vLLM's: of equal ones,
    `compatibility_hash` is the same.
    """
    groups = kv_cache_config.kv_cache_groups
    block_size = groups[0].kv_cache_spec.block_size
    page_bytes = max(group.kv_cache_spec.page_size_bytes for group in groups)
    return KvGeometry(
        num_layers=sum(len(group.layer_names) for group in groups),
        num_blocks=kv_cache_config.num_blocks,
        block_size=block_size,
        num_kv_heads=1,
        head_size=page_bytes // (2 * block_size * DTYPE_BYTES["bfloat16"]),
        dtype="bfloat16",
        order=f"block,vllm-{compatibility_hash[:16]}",
    )


def _first_head(vllm_config: VllmConfig) -> int:
    """Ranks hold equal shares of the model's KV heads, in order; more ranks than heads: neighbours hold the same."""
    parallel = vllm_config.parallel_config
    num_heads: int = vllm_config.model_config.get_total_num_kv_heads()
    first_head: int = parallel.rank * num_heads // parallel.tensor_parallel_size
    return first_head


def _spec(kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    if len(groups) != 1 or kinds != ["FullAttentionSpec"]:
        raise ConfigError(
            f"the KV cache has groups of {', '.join(kinds) or 'nothing'}; --engine vllm hands off one group of "
            "FullAttentionSpec: --engine-arg disable_hybrid_kv_cache_manager=true makes one of sliding windows"
        )
    spec = groups[0].kv_cache_spec
    assert isinstance(spec, FullAttentionSpec)
    return spec


def _dtype(spec: FullAttentionSpec) -> str:
    dtype = str(spec.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(
            f"the KV cache's dtype is {dtype}; --engine vllm hands off {', '.join(DTYPE_BYTES)}: "
            "leave kv_cache_dtype as it is"
        )
    return dtype


def _order(module: Any, layout: str | None) -> str:
    backend = module.attn_backend.get_name()
    if backend == "CPU_ATTN" and layout == "LBHNC":
        return f"block,head,vllm-cpu-{module.isa}"
    if backend == "FLASH_ATTN" and layout in _FLASH_ORDERS:
        return _FLASH_ORDERS[layout]
    raise ConfigError(
        f"the KV cache is laid out as {layout} for {backend}; --engine vllm knows LBHNC for CPU_ATTN, "
        f"{' and '.join(_FLASH_ORDERS)} for FLASH_ATTN: choose by --engine-arg attention_backend=FLASH_ATTN"
    )


def _check_tensor(name: str, tensor: torch.Tensor, geometry: KvGeometry) -> None:
    """Blocks outermost and without gaps: then block b lies `layer_block_bytes` behind block b - 1."""
    block_bytes = tensor.stride(0) * tensor.element_size()
    if len(tensor) != geometry.num_blocks or block_bytes != geometry.layer_block_bytes:
        raise ConfigError(
            f"the KV cache of {name} has {len(tensor)} blocks, {block_bytes} bytes apart; --engine vllm hands off "
            f"{geometry.num_blocks} blocks of {geometry.layer_block_bytes} bytes each"
        )


def _num_bytes(geometry: KvGeometry) -> int:
    return geometry.num_blocks * geometry.layer_block_bytes
