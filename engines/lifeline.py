"""The lifeline: an engine process dies with the runtime that spawned it, and takes its own children along."""

from __future__ import annotations

import os
import signal
import threading


def hold_lifeline(read_end: int) -> None:
    """Kill this process group once the other end of the pipe is closed, whoever closed it and however.

    PR_SET_PDEATHSIG would fire when the *thread* that forked us ends, and would not reach our children.
    """
    threading.Thread(target=_wait_for_end, args=(read_end,), name="lifeline", daemon=True).start()


def _wait_for_end(read_end: int) -> None:
    while os.read(read_end, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)
