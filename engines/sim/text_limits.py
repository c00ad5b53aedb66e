"""What the served text needs to know of a model: read from its directory, whatever the model's architecture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from dynrt.engines.models.directory import TokenIds, eos_token_ids, read_json

PositiveInt = Annotated[int, msgspec.Meta(gt=0)]


class TextLimits(msgspec.Struct, frozen=True):
    """Tokens only: the simulated model has no weights."""

    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    @classmethod
    def from_dir(cls, model_dir: Path) -> TextLimits:
        """From config.json and, where there is one, generation_config.json. Raises ModelLoadError."""
        config = read_json(model_dir / "config.json", _Config)
        ends = frozenset(eos_token_ids(model_dir, config.eos_token_id))
        return cls(config.max_position_embeddings, config.vocab_size, ends)


class _Config(msgspec.Struct):
    vocab_size: PositiveInt
    max_position_embeddings: PositiveInt
    eos_token_id: TokenIds = None
