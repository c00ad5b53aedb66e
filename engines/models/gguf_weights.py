"""GGUF tensors under their Hugging Face names and in Hugging Face row order, for llama and qwen2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dynrt.engines.models.gguf_file import GgufFile
from dynrt.engines.models.safetensors_file import write_bf16

ROPE_FREQS = "rope_freqs.weight"  # a table, not a weight: becomes rope_scaling in config.json
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BIASED = {"llama": (), "qwen2": ("attn_q", "attn_k", "attn_v")}
ARCHITECTURES = tuple(_BIASED)


def write_weights(gguf: GgufFile, path: Path, report: Callable[[str], None]) -> None:
    """All weights as bfloat16 into the safetensors file `path`."""
    names = _hugging_face_names(gguf)
    shapes = {target: gguf.shape(source) for source, target in names.items()}
    write_bf16(path, shapes, _converted(gguf, names, report))


def _converted(
    gguf: GgufFile, names: dict[str, str], report: Callable[[str], None]
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    head_counts = _permuted_heads(gguf)
    for number, (source, target) in enumerate(names.items()):
        if number % max(1, len(names) // 10) == 0:
            report(f"converting {gguf.path.name}: {100 * number // len(names)} % of {len(names)} tensors")
        values = gguf.load(source)
        heads = head_counts.get(source.split(".")[-2])
        yield target, values if heads is None else _unpermute(values, heads)


def _hugging_face_names(gguf: GgufFile) -> dict[str, str]:
    """GGUF name to Hugging Face name; ModelLoadError unless the file has exactly the tensors it must have."""
    names = _expected_names(gguf)
    if not gguf.has_tensor("output.weight"):  # the head is tied to the embedding
        del names["output.weight"]
    missing = [name for name in names if not gguf.has_tensor(name)]
    unknown = [name for name in gguf.tensor_names() if name not in names and name != ROPE_FREQS]
    if missing or unknown:
        raise gguf.error(
            f"is no plain {gguf.architecture} model: {len(missing)} tensors are missing {missing[:3]}, "
            f"{len(unknown)} are unknown {unknown[:3]}; use the model's Hugging Face directory with another engine"
        )
    return names


def _expected_names(gguf: GgufFile) -> dict[str, str]:
    names = dict(_OUTER)
    for layer in range(gguf.hyper("block_count", int)):
        for source, target in _LAYER.items():
            names[f"blk.{layer}.{source}.weight"] = f"model.layers.{layer}.{target}.weight"
        for source in _BIASED[gguf.architecture]:
            names[f"blk.{layer}.{source}.bias"] = f"model.layers.{layer}.{_LAYER[source]}.bias"
    return names


def _permuted_heads(gguf: GgufFile) -> dict[str, int]:
    """Tensors whose rows llama.cpp reordered, with their number of heads. It leaves qwen2 as it is."""
    if gguf.architecture != "llama":
        return {}
    heads = gguf.hyper("attention.head_count", int)
    return {"attn_q": heads, "attn_k": gguf.hyper("attention.head_count_kv", int, heads)}


def _unpermute(rows: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """[heads * head_dim, in]: from RoPE pairs side by side to Hugging Face's two halves of each head."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
