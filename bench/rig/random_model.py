"""A random model on which prefill takes as long as a bench can afford; what it says means nothing."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))  # the tests' own writer of such models

from tiny_model import write_tiny_model

CONTEXT = 8192


def write_random_model(directory: Path, hidden: int, num_layers: int) -> Path:
    """A Llama in float32 with 64 values of K and V per token and layer, whatever its size."""
    return write_tiny_model(
        directory / f"random-{hidden}x{num_layers}",
        num_layers=num_layers,
        hidden=hidden,
        heads=2,
        kv_heads=2,
        head_size=32,
        context=CONTEXT,
    )
