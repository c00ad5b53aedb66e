"""Starts front processes."""

from __future__ import annotations

import os
import subprocess

import msgspec

from dynrt.runtime.fronts.messages import FrontSettings
from dynrt.runtime.spawner import ChildProcess, dynrt_command


def spawn_front(settings: FrontSettings) -> ChildProcess:
    """Runs `dynrt front`, tied to us by a lifeline as an engine is; settings go to its standard input."""
    read_end, write_end = os.pipe()
    try:
        popen = subprocess.Popen(
            [*dynrt_command(), "front", "--lifeline", str(read_end)],
            stdin=subprocess.PIPE,
            pass_fds=(read_end,),
            start_new_session=True,
        )
        assert popen.stdin is not None
        popen.stdin.write(msgspec.json.encode(settings))  # a few hundred bytes: the pipe takes them at once
        popen.stdin.close()
    except BaseException:
        os.close(write_end)
        raise
    finally:
        os.close(read_end)
    return ChildProcess(popen, write_end)
