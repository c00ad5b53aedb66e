"""One structured line per event, on standard error."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Literal, TextIO

import msgspec

from dynrt.runtime.trace_context import trace_id_of

FORMAT_VARIABLE = "DYNRT_LOG_FORMAT"  # tells processes that are started from here
SECONDS_DIGITS = 6  # of times in JSON: microseconds
LogFormat = Literal["text", "json"]

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class FrequentRecord(logging.LogRecord):
    """One of many that differ in `fields` only: what is the same for all is found out once, as `common`."""

    def __init__(self, common: logging.LogRecord, fields: dict[str, object]) -> None:
        vars(self).update(vars(common))
        vars(self).update(fields)
        self.created = time.time()
        self.msecs = self.created % 1 * 1000
        self.fields = fields


class EventHandler(logging.StreamHandler[TextIO]):
    """One write for each event, and no filters."""

    def handle(self, record: logging.LogRecord) -> bool:
        assert self.lock is not None
        try:
            line = self.format(record) + "\n"
            with self.lock:
                self.stream.write(line)
                self.stream.flush()
        except Exception:
            self.handleError(record)
        return True


class EventFormatter(logging.Formatter):
    """`12:03:04.567 INFO fleet: worker registered worker=prefill-0 pid=123`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = _clock(int(record.created))
        where = record.name.removeprefix("dynrt.")
        line = f"{clock}.{int(record.msecs):03d} {record.levelname} {where}: {record.getMessage()}"
        for name, value in _fields(record).items():
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            misleads = " " in text or not text.isprintable()
            line += f" {name}={text!r}" if misleads else f" {name}={text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """`{"ts":"2026-01-31T12:03:04.567Z","level":"INFO","logger":"dynrt.fleet","msg":"worker registered","pid":123}`."""

    def format(self, record: logging.LogRecord) -> str:
        ts = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {
            "ts": ts.removesuffix("+00:00") + "Z",
            "level": record.levelname,
            "logger": record.name,
            "msg": record.getMessage(),
            **{name: _short(value) for name, value in _fields(record).items()},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line, enc_hook=str).decode()


def _short(value: object) -> object:
    return round(value, SECONDS_DIGITS) if isinstance(value, float) else value


def trace_fields(traceparent: str) -> dict[str, str]:
    """What a line about a request says of its trace, if it has one."""
    return {"trace_id": trace_id_of(traceparent)} if traceparent else {}


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    if isinstance(record, FrequentRecord):
        return record.fields
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


@lru_cache(maxsize=1)
def _clock(second: int) -> str:
    """Local time; asked for once in a second of many lines."""
    return time.strftime("%H:%M:%S", time.localtime(second))


def set_up_logs(wanted: LogFormat | None = None) -> None:
    """For processes that are dynrt's own; a program that embeds the runtime keeps its own logging.

    `wanted` None: as the process is told that started this one. Processes started from here do likewise.
    """
    if wanted is not None:
        os.environ[FORMAT_VARIABLE] = wanted
    # Python's logging HOWTO: what no format here shows need not be found out for every line.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    is_json = os.environ.get(FORMAT_VARIABLE) == "json"
    handler = EventHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if is_json else EventFormatter())
    for name, level in (("dynrt", logging.INFO), ("opentelemetry", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
