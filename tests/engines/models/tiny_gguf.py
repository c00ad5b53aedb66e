"""Tiny GGUF files with random weights, written with the gguf package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, FFN, LAYERS = 64, 4, 2, 96, 2
HEAD_DIM = HIDDEN // HEADS
SPECIAL = ["<|end|>", "<|start|>"]
MERGES = ["h e", "l l", "he ll", "Ġ w", "1 2"]
TOKENS = [
    *SPECIAL,
    *sorted(pre_tokenizers.ByteLevel.alphabet()),
    "<tool>",
    "he",
    "ll",
    "hell",
    "Ġw",
    "12",
    "hello",
]
TEMPLATE = (
    "{% for m in messages %}{{ '<|start|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
)


def write_tiny_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
) -> dict[str, np.ndarray]:
    """Write `path`; returns its float32 tensors. `metadata` and `tensors` are laid over the defaults; None leaves out.

    Matrices are stored as Q8_0, vectors as F32; what is returned is what was quantised.
    """
    values = {**_weights(architecture), **(tensors or {})}
    writer = GGUFWriter(path, architecture)
    for key, value in {**_metadata(architecture), **(metadata or {})}.items():
        _add(writer, key, value)
    for name, value in values.items():
        if value is not None and value.ndim == 2:
            writer.add_tensor(
                name, quantize(value, GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0
            )
        elif value is not None:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: value for name, value in values.items() if value is not None}


def _metadata(architecture: str) -> dict[str, Any]:
    hyperparameters = {
        "block_count": LAYERS,
        "context_length": 128,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
        "rope.dimension_count": HEAD_DIM,
    }
    kinds = [3 if token in SPECIAL else 4 if token == "<tool>" else 1 for token in TOKENS]
    return {f"{architecture}.{key}": value for key, value in hyperparameters.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_uint32(key, value)


def _weights(architecture: str) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    kv = KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(TOKENS), HIDDEN),
        "output_norm.weight": (HIDDEN,),
    }
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        shapes |= {f"{prefix}{norm}.weight": (HIDDEN,) for norm in ("attn_norm", "ffn_norm")}
        shapes |= {
            f"{prefix}attn_{name}.weight": (rows, HIDDEN)
            for name, rows in (("q", HIDDEN), ("k", kv), ("v", kv))
        }
        shapes |= {f"{prefix}attn_output.weight": (HIDDEN, HIDDEN), f"{prefix}ffn_down.weight": (HIDDEN, FFN)}
        shapes |= {f"{prefix}ffn_{name}.weight": (FFN, HIDDEN) for name in ("gate", "up")}
        if architecture == "qwen2":
            shapes |= {
                f"{prefix}attn_{name}.bias": (rows,) for name, rows in (("q", HIDDEN), ("k", kv), ("v", kv))
            }
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
