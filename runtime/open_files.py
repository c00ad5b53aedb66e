"""Lets this process, and those it starts, have enough files and sockets open."""

from __future__ import annotations

import resource

WANTED = 65_536  # a connection takes one


def allow_many() -> None:
    """Raise the soft limit as far as is wanted and the hard limit lets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
