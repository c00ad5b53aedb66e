"""From a GGUF file to a directory in the Hugging Face format: bfloat16 weights, tokenizer, template, config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dynrt.engines.models.gguf_config import generation_config, model_config
from dynrt.engines.models.gguf_file import GgufFile
from dynrt.engines.models.gguf_tokenizer import build_tokenizer, chat_template, tokenizer_config
from dynrt.engines.models.gguf_weights import ARCHITECTURES, write_weights


def convert(path: Path, out_dir: Path, report: Callable[[str], None]) -> None:
    """Fill the empty directory `out_dir`. ModelLoadError if the file is damaged or of a kind not supported."""
    report(f"reading {path.name}")
    gguf = GgufFile(path)
    if gguf.architecture not in ARCHITECTURES:
        raise gguf.error(
            f"has the architecture {gguf.architecture!r}; only {' and '.join(ARCHITECTURES)} can be converted"
        )
    _write_tokenizer(gguf, out_dir)
    write_weights(gguf, out_dir / "model.safetensors", report)
    _write_json(out_dir / "generation_config.json", generation_config(gguf))
    _write_json(out_dir / "config.json", model_config(gguf))


def _write_tokenizer(gguf: GgufFile, out_dir: Path) -> None:
    build_tokenizer(gguf).save(str(out_dir / "tokenizer.json"))
    _write_json(out_dir / "tokenizer_config.json", tokenizer_config(gguf))
    template = chat_template(gguf)
    if template is not None:
        (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n")
