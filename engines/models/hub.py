"""Models from the Hugging Face hub: found in its local cache without its client, fetched with it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

from dynrt.runtime.errors import ModelLoadError

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_FILES = {
    "allow_patterns": ["*.json", "*.safetensors", "*.jinja"],
    "ignore_patterns": ["*/*", "consolidated*"],  # the same weights in other formats
}
_REVISION = "main"
_MAX_REASON_CHARS = 300


def is_hub_id(model: str) -> bool:
    """Whether `model` has the form owner/name."""
    return _HUB_ID.fullmatch(model) is not None and not model.startswith((".", "/"))


def cache_dir() -> Path:
    """Where the hub client keeps its downloads (its environment variables, in its order)."""
    if path := os.environ.get("HF_HUB_CACHE"):
        return Path(path).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def find(hub_id: str) -> Path | None:
    """The newest snapshot in the local cache, whole or not. Never touches the network."""
    repo = cache_dir() / ("models--" + hub_id.replace("/", "--"))
    ref = repo / "refs" / _REVISION
    if not ref.is_file():
        return None
    snapshot = repo / "snapshots" / ref.read_text().strip()
    return snapshot if snapshot.is_dir() else None


def fetch(hub_id: str, report: Callable[[str], None]) -> Path:
    """Download what is not in the cache yet. ModelLoadError if the hub cannot be asked or refuses."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # A connection lost midway shows as an error of the client's HTTP library, another one in each of its versions.
    transport_error = HfHubHTTPError.__bases__[0]
    report(f"asking the Hugging Face hub for {hub_id}")
    try:
        return _download(hub_id, report)
    except (transport_error, HFValidationError, OSError) as error:
        raise ModelLoadError(_explain(hub_id, error)) from error


def _download(hub_id: str, report: Callable[[str], None]) -> Path:
    """File by file, so that progress can be told in lines."""
    from huggingface_hub import hf_hub_download, snapshot_download

    listing = snapshot_download(hub_id, **_FILES, dry_run=True)
    todo = [file for file in listing if file.will_download]
    for number, file in enumerate(todo, start=1):
        report(
            f"downloading {hub_id}: file {number} of {len(todo)}, {file.filename} ({_size(file.file_size)})"
        )
        hf_hub_download(hub_id, file.filename, revision=file.commit_hash)
    return Path(snapshot_download(hub_id, **_FILES))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def _explain(hub_id: str, error: Exception) -> str:
    reason = " ".join(str(error.__cause__ or error).split())[:_MAX_REASON_CHARS]
    return (
        f"model {hub_id!r} is no local path, is not complete in the hub cache {cache_dir()} (HF_HUB_CACHE), "
        f"and could not be fetched from the Hugging Face hub: {reason}"
    )
