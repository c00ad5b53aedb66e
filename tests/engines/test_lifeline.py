"""The lifeline: once its other end is closed, a process goes, and its children with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from thread_fakes import DEADLINE_S

ENGINE = """
import subprocess, sys, threading
from dynrt.engines.lifeline import hold_lifeline
hold_lifeline(int(sys.argv[1]))
subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print("up", flush=True)
threading.Event().wait()
"""


def test_a_closed_lifeline_ends_the_process_group() -> None:
    read_end, write_end = os.pipe()
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(read_end)],
        pass_fds=(read_end,),
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    os.close(read_end)
    assert engine.stdout is not None and engine.stdout.readline() == b"up\n"
    os.write(write_end, b"x")  # what is written does not matter
    assert engine.poll() is None
    os.close(write_end)
    assert engine.wait(DEADLINE_S) == -signal.SIGKILL
    # The child has the same standard output: its end says that nobody is left.
    rest, _ = engine.communicate(timeout=DEADLINE_S)
    assert rest == b""
