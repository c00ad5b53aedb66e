"""A copy of the start scripts with stand-ins for Python, pip and the tools, so that set-up takes milliseconds."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = "bash basename cat chmod cp cut dirname env flock grep ln mkdir mktemp mv ps readlink rm sed setsid sha256sum"
DEADLINE_S = 30.0

# Does what the scripts ask of Python: say whether it is new enough, make an environment, install. The files
# in $SANDBOX are its switches.
FAKE_PYTHON = """\
#!/usr/bin/env bash
set -euo pipefail
case "$1 $2" in
    "-c "*tomllib*)
        printf '%s\\n' "${@:4}" # the names of the lists stand for what is in them
        ;;
    "-c "*)
        [[ ! -e $SANDBOX/python_is_old ]]
        ;;
    "-m venv")
        echo venv >>"$SANDBOX/calls"
        rm -rf "$4"
        mkdir -p "$4/bin"
        cp "$0" "$4/bin/python"
        ;;
    "-m pip")
        trap 'exit 1' INT # as pip does
        echo "pip ${*:4}" >>"$SANDBOX/calls"
        if [[ -p $SANDBOX/pip_pauses ]]; then cat "$SANDBOX/pip_pauses"; fi
        if [[ -e $SANDBOX/no_cpu_build && $* == *+cpu* ]]; then exit 1; fi
        if [[ -e $SANDBOX/pip_fails ]]; then echo "ERROR: the network is down" && exit 3; fi
        for tool in dynrt ruff mypy pytest; do cp "$SANDBOX/tool" "${0%/*}/$tool"; done
        ;;
    *) # a benchmark, or dynrt where it is not installed
        echo "python $*"
        ;;
esac
"""

# Stands for every program that the environment brings: notes the call, shows its arguments, fails if told to.
FAKE_TOOL = """\
#!/usr/bin/env bash
name=${0##*/}
echo "$name" >>"$SANDBOX/calls"
printf '%s\\n' "$name" "$@"
if [[ -p $SANDBOX/${name}_pauses ]]; then cat "$SANDBOX/${name}_pauses"; fi
if [[ -e $SANDBOX/${name}_leaves_a_process ]]; then setsid sleep 60 >/dev/null 2>&1 & fi
if [[ -e $SANDBOX/${name}_fails ]]; then exit 7; fi
"""


class SetupSandbox:
    """`clone` is the copy, in a folder with spaces; `calls()` tells what was run, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clone = folder / "a clone of dynrt"
        self.programs = folder / "programs"
        for scripts in ("bin", ".ci"):
            shutil.copytree(REPOSITORY / scripts, self.clone / scripts)
        shutil.copy(REPOSITORY / "pyproject.toml", self.clone)
        self.programs.mkdir()
        for tool in [*TOOLS.split(), "sleep", "tail"]:
            (self.programs / tool).symlink_to(str(shutil.which(tool)))
        write_program(self.programs / "python3.11", FAKE_PYTHON)
        write_program(folder / "tool", FAKE_TOOL)

    def switch(self, name: str) -> None:
        (self.folder / name).touch()

    def calls(self) -> list[str]:
        log = self.folder / "calls"
        return log.read_text().splitlines() if log.exists() else []

    def forget_calls(self) -> None:
        (self.folder / "calls").unlink()

    def start(
        self,
        *arguments: str,
        script: Path | None = None,
        cwd: Path | None = None,
        stderr: int = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """As cron would: no terminal, no HOME, hardly any environment. The script is bin/dynrt unless given."""
        return subprocess.Popen(
            ["env", "--default-signal=INT", script or self.clone / "bin" / "dynrt", *arguments],
            cwd=cwd or self.folder,
            env={
                "PATH": str(self.programs),
                "SANDBOX": str(self.folder),
                "XDG_CACHE_HOME": str(self.folder / "cache"),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, script: Path | None = None, cwd: Path | None = None) -> Ended:
        return wait_for_end(self.start(*arguments, script=script, cwd=cwd))

    @contextmanager
    def paused_in(self, program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A start that waits inside `pip` or a tool until the block ends."""
        pause = self.folder / f"{program}_pauses"
        os.mkfifo(pause)
        process = self.start(*arguments)
        with pause.open("w"):  # opens once the stand-in reads from it
            pause.unlink()  # so that only one call waits
            yield process


class Ended:
    """How a start ended."""

    def __init__(self, status: int, stdout: str, stderr: str) -> None:
        self.status = status
        self.stdout = stdout
        self.stderr = stderr


def wait_for_end(process: subprocess.Popen[str]) -> Ended:
    stdout, stderr = process.communicate(timeout=DEADLINE_S)
    return Ended(process.returncode, stdout, stderr)


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)
