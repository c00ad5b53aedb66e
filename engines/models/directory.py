"""A model directory in the Hugging Face format: what it must hold to be loaded here, and its JSON files."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from dynrt.runtime.errors import ModelLoadError

T = TypeVar("T")

TokenIds = int | list[int] | None  # as JSON files give one or several


class _GenerationConfig(msgspec.Struct):
    eos_token_id: TokenIds = None


class ShardIndex(msgspec.Struct):
    """model.safetensors.index.json of a model in several files."""

    weight_map: dict[str, str]  # file by tensor


def missing_files(path: Path) -> list[str]:
    """Names of the files that `path` lacks; empty if the model is complete."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    return missing + _missing_weights(path)


def read_json(path: Path, shape: type[T]) -> T:
    """Raises ModelLoadError if the file is missing, malformed or of another shape."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=shape)
    except OSError as error:
        raise ModelLoadError(
            f"cannot read {path}: {error.strerror}; expected a Hugging Face model"
        ) from error
    except msgspec.MsgspecError as error:
        raise ModelLoadError(f"{path}: {error}") from error


def eos_token_ids(model_dir: Path, of_config: TokenIds) -> tuple[int, ...]:
    """From generation_config.json, else config.json: the former is what the model's authors generate with."""
    path = model_dir / "generation_config.json"
    ids = read_json(path, _GenerationConfig).eos_token_id if path.exists() else None
    if ids is None:
        ids = of_config
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _missing_weights(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [] if any(path.glob("*.safetensors")) else ["*.safetensors"]
    try:
        shards = set(msgspec.json.decode(index.read_bytes(), type=ShardIndex).weight_map.values())
    except msgspec.DecodeError as error:
        return [f"readable {index.name} ({error})"]
    return sorted(shard for shard in shards if not (path / shard).is_file())
