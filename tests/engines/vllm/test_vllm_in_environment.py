"""The checks of the vLLM engine, `*_checks.py` beside this file, where vLLM is installed."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from vllm_environment import vllm_command

HERE = Path(__file__).parent
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device: layers' events and piecewise graphs of a running engine were not looked at",
    ),
]
CHECKS = [
    pytest.param(path, id=path.stem, marks=ON_GPU if path.stem == "gpu_checks" else ())
    for path in sorted(HERE.glob("*_checks.py"))
]
LIMIT_S = 240.0

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
]  # the environment may have to be built


@pytest.mark.parametrize("checks", CHECKS)
def test_checks_pass_where_vllm_is(checks: Path, tmp_path: Path) -> None:
    pytest_options = ["-p", "no:cacheprovider", f"--basetemp={tmp_path / 'checks'}"]
    pytest_options += ["-o", "filterwarnings=ignore"]  # vLLM's imports warn of much
    command = vllm_command("pytest", *pytest_options, str(checks))
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-5_000:]}"
