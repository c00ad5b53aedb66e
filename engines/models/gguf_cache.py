"""GGUF files converted once, each into a directory of the user's cache that is named after its content."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from dynrt.runtime.errors import ModelLoadError

_CONVERTER_VERSION = 1  # raise when a conversion of the same file comes out differently
_WHOLE_FILE_BYTES = 256 << 20
_SAMPLE_BYTES = 1 << 20
_SAMPLE_STRIDE_BYTES = 64 << 20
_WORK_PREFIX = ".work-"
_ABANDONED_S = 24 * 3600.0


def models_dir() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return base / "dynrt" / "models"


@contextlib.contextmanager
def work_dir() -> Iterator[Path]:
    """A new directory beside the models, gone afterwards. ModelLoadError if there can be none."""
    try:
        models_dir().mkdir(parents=True, exist_ok=True)
        path = Path(tempfile.mkdtemp(dir=models_dir(), prefix=_WORK_PREFIX))
    except OSError as error:
        raise ModelLoadError(
            f"cannot write to the model cache ({error}); set XDG_CACHE_HOME elsewhere"
        ) from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def content_key(gguf: Path) -> str:
    """What identifies the file's content: its SHA-256, of samples if it is large.

    Neither path nor modification time tells a replaced file (cp -p, rsync -t). Hashing 15 GB takes half a minute
    at every start, so beyond 256 MiB the key covers the size and 1 MiB in every 64, first and last included:
    header, vocabulary, and some of nearly every layer, which no other quantisation or fine-tune has alike.
    """
    size = gguf.stat().st_size
    with gguf.open("rb") as file:
        if size <= _WHOLE_FILE_BYTES:
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        for offset in [*range(0, size - _SAMPLE_BYTES, _SAMPLE_STRIDE_BYTES), size - _SAMPLE_BYTES]:
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def find(gguf: Path) -> Path | None:
    """Where the file was converted to, if it was."""
    return find_key(gguf.stem, content_key(gguf))


def find_key(stem: str, key: str) -> Path | None:
    path = _target(stem, key)
    return path if path.is_dir() else None


def convert_once(gguf: Path, report: Callable[[str], None]) -> Path:
    """The directory of the converted file. It appears whole or not at all, also if two processes convert at once."""
    from dynrt.engines.models.gguf_convert import convert

    target = _target(gguf.stem, content_key(gguf))
    if target.is_dir():
        return target
    _remove_abandoned()
    with work_dir() as work:
        convert(gguf, work, report)
        _publish(work, target)
    report(f"converted {gguf.name}; kept in {target}")
    return target


def _target(stem: str, key: str) -> Path:
    return models_dir() / f"{stem}-{key[:16]}-c{_CONVERTER_VERSION}"


def _publish(work: Path, target: Path) -> None:
    """Flush to disk, then rename: a power cut must not leave empty files under the final name."""
    work.chmod(0o755)
    for path in work.iterdir():
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        work.rename(target)
    except OSError:
        if not target.is_dir():  # else another process converted the same file meanwhile
            raise


def _remove_abandoned() -> None:
    """Leftovers of killed conversions and downloads; nothing takes a day."""
    for path in models_dir().glob(_WORK_PREFIX + "*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)
