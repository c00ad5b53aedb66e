"""config.json and generation_config.json from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from dynrt.engines.models.gguf_file import GgufFile
from dynrt.engines.models.gguf_weights import ROPE_FREQS

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")  # sequence, turn, message
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def model_config(gguf: GgufFile) -> dict[str, Any]:
    """What goes into config.json."""
    heads = gguf.hyper("attention.head_count", int)
    hidden = gguf.hyper("embedding_length", int)
    head_dim = gguf.hyper("attention.key_length", int, hidden // heads)
    if (rotary := gguf.hyper("rope.dimension_count", int, head_dim)) != head_dim:
        raise gguf.error(f"rotates {rotary} of {head_dim} dimensions per head; only full RoPE is supported")
    return {
        "architectures": [_CLASSES[gguf.architecture]],
        "model_type": gguf.architecture,
        "vocab_size": gguf.shape("token_embd.weight")[0],
        "hidden_size": hidden,
        "intermediate_size": gguf.hyper("feed_forward_length", int),
        "num_hidden_layers": gguf.hyper("block_count", int),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.hyper("attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": gguf.hyper("context_length", int),
        "rms_norm_eps": _shortest(gguf.hyper("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _shortest(gguf.hyper("rope.freq_base", float, 10000.0)),
        "rope_scaling": _rope_scaling(gguf, head_dim),
        "attention_bias": False,  # none at the output projection; that of qwen2 at q, k, v goes without saying
        "mlp_bias": False,
        "use_sliding_window": False,
        "tie_word_embeddings": not gguf.has_tensor("output.weight"),
        "torch_dtype": "bfloat16",
        **generation_config(gguf),
    }


def generation_config(gguf: GgufFile) -> dict[str, Any]:
    """What goes into generation_config.json: the ids that begin and end a text."""
    keys = [f"tokenizer.ggml.{name}" for name in _END_TOKENS]
    ends = sorted({gguf.get(key, int, -1) for key in keys} - {-1})
    if not ends:
        raise gguf.error("names no token that ends a text (tokenizer.ggml.eos_token_id)")
    begin = gguf.get("tokenizer.ggml.bos_token_id", int, -1)
    return {"eos_token_id": ends} | ({"bos_token_id": begin} if begin >= 0 else {})


def _shortest(value: float) -> float:
    """Metadata is float32: 9.99999974e-06 was written as 1e-05."""
    return float(str(np.float32(value)))


def _rope_scaling(gguf: GgufFile, head_dim: int) -> dict[str, Any] | None:
    if gguf.has_tensor(ROPE_FREQS):
        return _llama3_scaling(gguf, head_dim)
    kind = gguf.hyper("rope.scaling.type", str, "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {
        "rope_type": kind,
        "factor": _shortest(gguf.hyper("rope.scaling.factor", float)),
    }
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = gguf.hyper("rope.scaling.original_context_length", int)
    elif kind != "linear":
        raise gguf.error(f"scales RoPE by {kind!r}; only linear, yarn and llama3 are supported")
    return scaling


def _llama3_scaling(gguf: GgufFile, head_dim: int) -> dict[str, Any] | None:
    """The file only has the resulting table; its parameters are those that reproduce it."""
    table = gguf.load(ROPE_FREQS).astype(np.float64)
    if np.all(table == 1.0):
        return None
    factor = _shortest(float(table.max()))
    base = gguf.hyper("rope.freq_base", float, 10000.0)
    if table.shape != (head_dim // 2,) or not np.allclose(
        table, _llama3_table(base, head_dim, factor), rtol=1e-3
    ):
        raise gguf.error(f"scales RoPE by a table that Llama 3's formula with factor {factor} does not give")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}


def _llama3_table(base: float, head_dim: int, factor: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """By what each RoPE frequency is divided (Llama 3.1's published apply_scaling): long waves by `factor`."""
    wavelength = 2 * math.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] / wavelength
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / factor + smooth)
