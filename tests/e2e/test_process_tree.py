"""Looking at other processes, which end while they are looked at."""

from __future__ import annotations

import gc
import os

import pytest
from process_tree import listening


def test_a_descriptor_that_goes_meanwhile_leaves_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning in a finalizer would be blamed on whichever test runs then."""

    def gone(path: str) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "readlink", gone)
    assert listening([os.getpid()]) == set()
    gc.collect()
