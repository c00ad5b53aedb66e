"""The peers of `bench/frontend.py`: NVIDIA Dynamo's frontend and mocker, and vllm-router, in environments of their own.

A peer whose environment cannot be built is named, not faked.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# `ai-dynamo` declares a requirement that PyPI has only as a placeholder; frontend and mocker need no more than this.
DYNAMO = (
    "ai-dynamo==1.6.1",
    "ai-dynamo-runtime==1.6.1",
    "uvloop==0.23.0",
    "PyYAML==6.0.4",
    "msgspec==0.23.0",
    "pydantic==2.13.5",
    "pydantic_core==2.46.5",
    "annotated-types==0.8.0",
    "typing-inspection==0.4.5",
    "typing_extensions==4.16.0",
    "packaging==26.4",
)
VLLM_ROUTER = ("vllm-router==0.1.17",)


def dynamo_python() -> Path | str:
    """The interpreter of an environment that has it, or why there is none."""
    return _python("ai-dynamo", DYNAMO, resolve=False)


def vllm_router_python() -> Path | str:
    """The same for vllm-router."""
    return _python("vllm-router", VLLM_ROUTER, resolve=True)


def _python(name: str, requirements: tuple[str, ...], *, resolve: bool) -> Path | str:
    spec = importlib.util.spec_from_file_location(
        "client_environment", ROOT / "tests" / "client_environment.py"
    )
    assert spec is not None and spec.loader is not None
    environments = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(environments)
    try:
        python: Path = environments.client_python(name, requirements, resolve=resolve)
    except environments.ClientEnvironmentError as error:
        return str(error)
    return python
