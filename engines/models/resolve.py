"""From what a user names as MODEL to a directory in the Hugging Face format.

Light to import: the runtime asks `find_ready`; `prepare` does the slow work, normally in a process of its own
(`python -m dynrt.engines.models MODEL`), so that numpy and the hub client never enter the runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from dynrt.engines.models import default_model, gguf_cache, hub
from dynrt.engines.models.directory import missing_files
from dynrt.runtime.errors import ModelLoadError

Report = Callable[[str], None]


class ModelDir(msgspec.Struct, frozen=True):
    """A model ready to be loaded: `path` holds config.json, tokenizer.json and *.safetensors."""

    path: str
    name: str


def find_ready(model: str | None) -> ModelDir | None:
    """The directory of `model` if nothing has to be fetched or converted first. ModelLoadError if unreadable."""
    try:
        return _find_ready(model)
    except OSError as error:
        raise ModelLoadError(f"model {model!r} cannot be read ({error.strerror}); {_accepted()}") from error


def _find_ready(model: str | None) -> ModelDir | None:
    path: Path | None
    if model is None or model == default_model.ALIAS:
        name, path = default_model.ALIAS, default_model.find()
    elif _is_gguf(model):
        name, path = Path(model).stem, gguf_cache.find(Path(model))
    elif Path(model).exists():
        name, path = Path(model).resolve().name, Path(model).resolve()
    else:
        name, path = model, hub.find(model) if hub.is_hub_id(model) else None
    if path is None or missing_files(path):
        return None
    return ModelDir(str(path), name)


def prepare(model: str | None, report: Report) -> ModelDir:
    """Fetch and convert what `model` still needs; `report` gets one-line progress messages.

    ModelLoadError says what was looked for, where, and the way out.
    """
    ready = find_ready(model)
    if ready is not None:
        return ready
    if model is None or model == default_model.ALIAS:
        return ModelDir(str(default_model.fetch(report)), default_model.ALIAS)
    if _is_gguf(model):
        return ModelDir(str(gguf_cache.convert_once(Path(model), report)), Path(model).stem)
    if Path(model).exists():
        raise _unusable(Path(model))
    if hub.is_hub_id(model):
        return ModelDir(str(_complete(hub.fetch(model, report))), model)
    raise ModelLoadError(f"model {model!r} is nowhere to be found; {_accepted()}")


def _is_gguf(model: str) -> bool:
    """An existing file is always tried as GGUF: its reader tells best what is wrong with it."""
    return Path(model).is_file()


def _complete(path: Path) -> Path:
    if missing_files(path):
        raise _unusable(path)
    return path


def _unusable(path: Path) -> ModelLoadError:
    missing = ", ".join(missing_files(path))
    return ModelLoadError(f"model directory {path} has no {missing}; {_accepted()}")


def _accepted() -> str:
    return (
        "give a directory with config.json, tokenizer.json and *.safetensors, a .gguf file, "
        f"a Hugging Face hub id (owner/name), or {default_model.ALIAS!r}, the default"
    )
