"""The tests' environments for clients that nobody here wrote, for benches."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from client_environment import ClientEnvironmentError, client_python

__all__ = ["ClientEnvironmentError", "client_python"]
