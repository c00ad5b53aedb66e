"""Log lines: one per event, its fields behind it, nothing that could be taken for another line."""

from __future__ import annotations

import logging
import re
import sys

from dynrt.runtime.logs import EventFormatter


def formatted(message: str, name: str = "dynrt.fleet", **fields: object) -> str:
    record = logging.makeLogRecord({"name": name, "levelname": "INFO", "msg": message, **fields})
    return EventFormatter().format(record)


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
