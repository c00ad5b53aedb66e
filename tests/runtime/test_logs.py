"""Log lines: one per event, its fields behind it, nothing that could be taken for another line."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from dynrt.runtime.logs import EventFormatter, EventHandler, JsonFormatter


def formatted(
    message: str,
    name: str = "dynrt.fleet",
    formatter: type[logging.Formatter] = EventFormatter,
    **fields: object,
) -> str:
    record = logging.makeLogRecord({"name": name, "levelname": "INFO", "msg": message, **fields})
    return formatter().format(record)


def test_event_and_its_fields() -> None:
    line = formatted("worker registered", worker="prefill-0", pid=12, age_s=1.23456)
    assert re.fullmatch(
        r"\d\d:\d\d:\d\d\.\d\d\d INFO fleet: worker registered worker=prefill-0 pid=12 age_s=1\.235", line
    )


def test_values_are_quoted_where_they_could_mislead() -> None:
    line = formatted("worker lost", reason="it died", forged="x\n12:00:00.000 INFO fleet: all is well")
    assert "reason='it died'" in line
    assert "\n" not in line


def test_failure_is_shown_with_its_traceback() -> None:
    try:
        raise KeyError("missing")
    except KeyError:
        line = formatted("failed", exc_info=sys.exc_info())
    assert line.splitlines()[0].endswith("fleet: failed")
    assert line.splitlines()[-1] == "KeyError: 'missing'"


def test_json_has_every_field_and_one_line() -> None:
    at = datetime(2026, 1, 31, 12, 3, 4, 567_000, UTC)
    fields = {"pid": 12, "age_s": 1.23456, "reason": "a\nb", "path": Path("/x"), "created": at.timestamp()}
    line = formatted("worker lost", formatter=JsonFormatter, **fields)
    assert "\n" not in line
    assert json.loads(line) == {
        "ts": "2026-01-31T12:03:04.567Z", "level": "INFO", "logger": "dynrt.fleet", "msg": "worker lost",
        "pid": 12, "age_s": 1.23456, "reason": "a\nb", "path": "/x",
    }  # fmt: skip


def test_json_failure_is_one_line_too() -> None:
    try:
        raise KeyError("missing")
    except KeyError:
        line = formatted("failed", formatter=JsonFormatter, exc_info=sys.exc_info())
    assert json.loads(line)["exception"].endswith("KeyError: 'missing'")
    assert "\n" not in line


LOGS_IN_A_CHILD = """
import logging, subprocess, sys
from dynrt.runtime.logs import set_up_logs
set_up_logs(*sys.argv[1:])
logging.getLogger("dynrt.engine").info("up")
if sys.argv[1:]:
    subprocess.run([sys.executable, "-c", sys.orig_argv[2]], check=True)
"""


def test_processes_that_are_started_log_alike() -> None:
    told = subprocess.run(
        [sys.executable, "-c", LOGS_IN_A_CHILD, "json"], capture_output=True, text=True, check=True
    ).stderr.splitlines()
    assert [json.loads(line)["msg"] for line in told] == ["up", "up"]


def test_whoever_logs_is_not_told_that_nobody_reads() -> None:
    broken = io.StringIO()
    broken.close()
    handler = EventHandler(broken, EventFormatter())
    handler.tell("dynrt.http", "request", {"status": 200})
    assert handler.handle(logging.makeLogRecord({"msg": "request"}))


FREQUENT_AND_OTHER = """
import logging, sys
from dynrt.runtime.logs import set_up_logs, tell
set_up_logs(sys.argv[1])
log, fields = logging.getLogger("dynrt.http"), {"path": "/a b", "status": 200, "ttft_s": 0.12345678}
log.info("request", extra=fields)
tell(log, "request", fields)
"""


@pytest.mark.parametrize("format", ["text", "json"])
def test_frequent_events_look_like_others(format: str) -> None:
    other, frequent = subprocess.run(
        [sys.executable, "-c", FREQUENT_AND_OTHER, format], capture_output=True, text=True, check=True
    ).stderr.splitlines()
    behind_the_time = other.index("INFO")
    assert frequent[behind_the_time:] == other[behind_the_time:] and "/a b" in frequent
