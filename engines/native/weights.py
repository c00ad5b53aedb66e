"""Reads a model's safetensors files, and checks that they hold exactly the tensors that its config calls for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from dynrt.engines.models.directory import ShardIndex, read_json
from dynrt.engines.native.config import ModelConfig
from dynrt.runtime.errors import ModelLoadError

_FLOAT_DTYPES = ("F32", "F16", "BF16")
_MAX_NAMES_SHOWN = 4


class Checkpoint:
    """The tensors of one model, read from disk one at a time and converted to `dtype` on `device`."""

    def __init__(
        self, model_dir: Path, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Raises ModelLoadError if a file is missing or broken, or its tensors do not match `config`."""
        self._dtype, self._device = dtype, device
        self._files = {path: _open(path) for path in _weight_files(model_dir)}
        self._path_of = {name: path for path, file in self._files.items() for name in list(file.keys())}
        self._check(model_dir, dict(expected_shapes(config)), ignored=_ignored_names(config))

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor of `expected_shapes`."""
        stored = self._files[self._path_of[name]].get_tensor(name)
        return stored.to(device=self._device, dtype=self._dtype)

    def stacked(self, names: list[str]) -> torch.Tensor:
        """Tensors of equal width, one below the other."""
        return torch.cat([self.tensor(name) for name in names])

    def _check(self, model_dir: Path, expected: dict[str, tuple[int, ...]], ignored: frozenset[str]) -> None:
        found = {name for name in self._path_of if name not in ignored and not name.endswith("inv_freq")}
        if missing := sorted(expected.keys() - found):
            raise ModelLoadError(f"{model_dir} lacks {_shown(missing)}, which its config.json calls for")
        if extra := sorted(found - expected.keys()):
            raise ModelLoadError(f"{model_dir} holds {_shown(extra)}, for which its config.json has no use")
        for name, shape in expected.items():
            self._check_tensor(name, shape)

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        path = self._path_of[name]
        stored = self._files[path].get_slice(name)
        if tuple(stored.get_shape()) != shape:
            raise ModelLoadError(
                f"{path}: {name} has shape {stored.get_shape()}; config.json says {list(shape)}"
            )
        if stored.get_dtype() not in _FLOAT_DTYPES:
            raise ModelLoadError(
                f"{path}: {name} is stored as {stored.get_dtype()}; supported: {', '.join(_FLOAT_DTYPES)}"
            )


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that the model needs."""
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    yield "model.norm.weight", (config.hidden_size,)
    if not config.tie_embeddings:
        yield "lm_head.weight", (config.vocab_size, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config):
            yield f"model.layers.{layer}.{name}", shape


def _layer_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)
    for name, out_features, in_features, has_bias in (
        ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q_size, config.o_bias),
        ("mlp.gate_proj", ffn, hidden, config.mlp_bias),
        ("mlp.up_proj", ffn, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, ffn, config.mlp_bias),
    ):
        yield f"{name}.weight", (out_features, in_features)
        if has_bias:
            yield f"{name}.bias", (out_features,)


def _ignored_names(config: ModelConfig) -> frozenset[str]:
    """A tied head is the embedding, even where a file holds a copy of it."""
    return frozenset({"lm_head.weight"}) if config.tie_embeddings else frozenset()


def _weight_files(model_dir: Path) -> list[Path]:
    index_path = model_dir / "model.safetensors.index.json"
    if not index_path.exists():
        return [model_dir / "model.safetensors"]
    index = read_json(index_path, ShardIndex)
    return [model_dir / name for name in sorted(set(index.weight_map.values()))]


class _TensorFile(Protocol):
    """What is used of an open safetensors file, whose own class is untyped."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...
    def get_slice(self, name: str) -> Any: ...


def _open(path: Path) -> _TensorFile:
    if not path.exists():
        raise ModelLoadError(f"{path} is missing; the native engine reads weights in safetensors format only")
    try:
        file: _TensorFile = safe_open(path, framework="pt", device="cpu")
    except SafetensorError as error:
        raise ModelLoadError(f"{path} is not a whole safetensors file: {error}") from error
    return file


def _shown(names: list[str]) -> str:
    rest = len(names) - _MAX_NAMES_SHOWN
    return ", ".join(names[:_MAX_NAMES_SHOWN]) + (f" and {rest} more tensors" if rest > 0 else "")
