"""Tells when files have been replaced or written to."""

from __future__ import annotations

import os
from collections.abc import Iterable

Stamp = tuple[int, int, int]  # modification time in ns, size, inode


class FileWatch:
    """Asked from time to time; a file that is gone has not changed until it is back."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._stamps = {path: _stamp(path) for path in paths}

    def changed(self) -> bool:
        """Whether any file is another than at the last call, or at the start."""
        before = dict(self._stamps)
        for path in self._stamps:
            self._stamps[path] = _stamp(path) or before[path]
        return self._stamps != before


def _stamp(path: str) -> Stamp | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
