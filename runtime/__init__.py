"""The asyncio side of dynrt: one Runtime starts the engines, plans, and streams what they generate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynrt.runtime.config import RuntimeConfig
    from dynrt.runtime.messages import SamplingParams
    from dynrt.runtime.requests import GenerateOutput, GenerateRequest
    from dynrt.runtime.runtime import Runtime

_HOMES = {
    "Runtime": "dynrt.runtime.runtime",
    "RuntimeConfig": "dynrt.runtime.config",
    "SamplingParams": "dynrt.runtime.messages",
    "GenerateRequest": "dynrt.runtime.requests",
    "GenerateOutput": "dynrt.runtime.requests",
}

__all__ = ["GenerateOutput", "GenerateRequest", "Runtime", "RuntimeConfig", "SamplingParams"]


def __getattr__(name: str) -> Any:
    # Looked up on first use: engine processes import dynrt.runtime.messages and must not pay for the rest.
    if name not in _HOMES:
        raise AttributeError(f"module 'dynrt.runtime' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
