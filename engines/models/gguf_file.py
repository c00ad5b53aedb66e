"""Reading a GGUF file: its metadata as Python values, its tensors as float32. Faults become ModelLoadError."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from numpy.typing import NDArray

from dynrt.runtime.errors import ModelLoadError

_T = TypeVar("_T")


class GgufFile:
    """An open GGUF file. Opening takes seconds for a large vocabulary (the gguf package reads string by string)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reader = _open(path)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = self.require("general.architecture", str)
        if self.get("split.count", int, 1) > 1:
            raise self.error(
                "is one part of a split model; join the parts with llama-gguf-split --merge first"
            )

    def error(self, problem: str) -> ModelLoadError:
        return ModelLoadError(f"GGUF file {self.path} {problem}")

    def get(self, key: str, kind: type[_T], default: _T) -> _T:
        """The value of metadata `key`, or `default` if it has none."""
        field = self._reader.get_field(key)
        if field is None:
            return default
        value: Any = field.contents()
        if kind is float and isinstance(value, int):
            value = float(value)
        if not isinstance(value, kind):
            raise self.error(f"has a {type(value).__name__} for {key}, {kind.__name__} was expected")
        return value

    def require(self, key: str, kind: type[_T]) -> _T:
        if self._reader.get_field(key) is None:
            raise self.error(f"lacks the metadata {key}")
        return self.get(key, kind, kind())

    def hyper(self, key: str, kind: type[_T], default: _T | None = None) -> _T:
        """A hyperparameter, that is `architecture.key`; required if there is no default."""
        name = f"{self.architecture}.{key}"
        return self.require(name, kind) if default is None else self.get(name, kind, default)

    def tensor_names(self) -> Iterator[str]:
        return iter(self._tensors)

    def has_tensor(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Outermost dimension first, as in PyTorch (the file has the reverse)."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def load(self, name: str) -> NDArray[np.float32]:
        tensor = self._tensors[name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise self.error(f"has {name} in {tensor.tensor_type.name}, which cannot be read here") from error
        if not np.isfinite(values).all():
            raise self.error(f"is damaged: {name} holds values that are not finite")
        return np.asarray(values, dtype=np.float32).reshape(self.shape(name))


def _open(path: Path) -> GGUFReader:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelLoadError(f"{path} is not a GGUF file: it begins with {magic!r} instead of b'GGUF'")
    try:
        return GGUFReader(path)
    except (ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        raise ModelLoadError(f"GGUF file {path} is cut off or damaged ({error}); fetch it again") from error
