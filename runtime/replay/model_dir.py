"""A model directory with nothing but limits in it: as much of a model as a replay needs."""

from __future__ import annotations

import json
from pathlib import Path

_TOKENIZER = {
    "version": "1.0",
    "model": {"type": "WordLevel", "vocab": {"": 0}, "unk_token": ""},
    "added_tokens": [],
}


def write_model_dir(path: Path, context_length: int, vocab_size: int) -> None:
    """Into an existing directory. No token ends an answer."""
    limits = {"max_position_embeddings": context_length, "vocab_size": vocab_size}
    (path / "config.json").write_text(json.dumps(limits))
    (path / "tokenizer.json").write_text(json.dumps(_TOKENIZER))
    (path / "model.safetensors").touch()
