"""Programs of the environment that `bin/vllm` makes and keeps: vLLM for CPUs, this very dynrt, and what tests need."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "bin" / "vllm"
BUILD_DEADLINE_S = 900.0


def vllm_command(*program: str) -> list[str]:
    """How to run a program of that environment, by its name and arguments; the first call may take minutes."""
    _build()
    return [str(SCRIPT), *program]


@cache
def _build() -> None:
    command = [SCRIPT, "pytest", "--version"]  # asking for pytest brings what tests need
    built = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_DEADLINE_S)
    assert built.returncode == 0, built.stderr
