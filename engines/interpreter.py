"""The interpreter, which the threads of an engine process share."""

from __future__ import annotations

import sys

SWITCH_S = 0.1e-3


def share_interpreter() -> None:
    """Let a thread that has become runnable run within 0.1 ms, not Python's 5.

    Compute gives the interpreter up at each operation, but takes it back before a thread that waits has woken: so the
    target of a handoff, or a layer that is ready to be pushed, could wait for several layers.
    """
    sys.setswitchinterval(SWITCH_S)
