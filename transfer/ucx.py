"""The environment that NIXL and UCX read when they are imported, so set by the parent or before the import."""

from __future__ import annotations

# Shared memory, loopback TCP and, where there are GPUs, copies between them; `self` is an agent writing to itself.
_ONE_HOST = {"UCX_TLS": "self,sm,tcp,cuda_copy,cuda_ipc", "UCX_NET_DEVICES": "lo"}
_QUIET = {"UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "FATAL"}  # what fails comes as an exception as well


def ucx_environment(*, one_host: bool) -> dict[str, str]:
    """`one_host`: no peer is elsewhere, so that nothing listens outside the loopback interface."""
    return {**_QUIET, **(_ONE_HOST if one_host else {})}
