"""What the served text needs to know of a model: read from its directory, whatever the model's architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from dynrt.runtime.errors import ModelLoadError

PositiveInt = Annotated[int, msgspec.Meta(gt=0)]
T = TypeVar("T")


class TextLimits(msgspec.Struct, frozen=True):
    """Tokens only: the simulated model has no weights."""

    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    @classmethod
    def from_dir(cls, model_dir: Path) -> TextLimits:
        """From config.json and, where there is one, generation_config.json. Raises ModelLoadError."""
        config = _read(model_dir / "config.json", _Config)
        generation_path = model_dir / "generation_config.json"
        generation = _read(generation_path, _Generation) if generation_path.exists() else _Generation()
        eos = generation.eos_token_id if generation.eos_token_id is not None else config.eos_token_id
        eos_token_ids = frozenset([eos] if isinstance(eos, int) else eos or [])
        return cls(config.max_position_embeddings, config.vocab_size, eos_token_ids)


class _Config(msgspec.Struct):
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    eos_token_id: int | list[int] | None = None


class _Generation(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def _read(path: Path, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=shape)
    except OSError as error:
        raise ModelLoadError(
            f"cannot read {path}: {error.strerror}; expected a Hugging Face model"
        ) from error
    except msgspec.MsgspecError as error:
        raise ModelLoadError(f"{path}: {error}") from error
