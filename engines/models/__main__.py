"""Prepare a model: `python -m dynrt.engines.models [MODEL]`.

Progress goes to stderr, line by line. The last line on stdout is a ModelDir as JSON (exit status 0), or
{"error": …} (exit status 2).
"""

from __future__ import annotations

import os
import sys

import msgspec

from dynrt.engines.models.resolve import prepare
from dynrt.runtime.errors import ModelLoadError


def main(arguments: list[str]) -> int:
    if len(arguments) > 1:
        print("usage: python -m dynrt.engines.models [MODEL]", file=sys.stderr)
        return 64
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # progress is told in lines
    try:
        ready = prepare(arguments[0] if arguments else None, _report)
    except ModelLoadError as error:
        print(msgspec.json.encode({"error": error.message}).decode(), flush=True)
        return 2
    print(msgspec.json.encode(ready).decode(), flush=True)
    return 0


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
