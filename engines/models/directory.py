"""What a model directory in the Hugging Face format must hold to be loaded here."""

from __future__ import annotations

from pathlib import Path

import msgspec


class _ShardIndex(msgspec.Struct):
    weight_map: dict[str, str]


def missing_files(path: Path) -> list[str]:
    """Names of the files that `path` lacks; empty if the model is complete."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    return missing + _missing_weights(path)


def _missing_weights(path: Path) -> list[str]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return [] if any(path.glob("*.safetensors")) else ["*.safetensors"]
    try:
        shards = set(msgspec.json.decode(index.read_bytes(), type=_ShardIndex).weight_map.values())
    except msgspec.DecodeError as error:
        return [f"readable {index.name} ({error})"]
    return sorted(shard for shard in shards if not (path / shard).is_file())
