"""A small program in the engine's place: reports what it is to the file `--join`, then waits for its end.

Its model's name says how it behaves: "waits", "exits" (with status 3), or "stops" (at SIGTERM's mercy, ignores it).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from dynrt.engines.lifeline import hold_lifeline


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("command")
    for name in ("--join", "--spawn-token", "--settings"):
        parser.add_argument(name)
    parser.add_argument("--lifeline", type=int)
    arguments = parser.parse_args()
    descriptors = sorted(
        int(name) for name in os.listdir("/proc/self/fd") if Path(f"/proc/self/fd/{name}").exists()
    )
    hold_lifeline(arguments.lifeline)
    settings = json.loads(arguments.settings)
    if settings["model_name"] == "exits":
        return 3
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchild = subprocess.Popen(["sleep", "600"])
    report = {
        "pid": os.getpid(),
        "grandchild": grandchild.pid,
        "lifeline": arguments.lifeline,
        "descriptors": descriptors,
        "spawn_token": arguments.spawn_token,
        "settings": settings,
    }
    partial = Path(arguments.join + ".partial")
    partial.write_text(json.dumps(report))
    partial.rename(arguments.join)
    return grandchild.wait()


if __name__ == "__main__":
    sys.exit(main())
