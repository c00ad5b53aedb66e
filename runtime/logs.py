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

_DYNRT = logging.getLogger("dynrt")
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class EventHandler(logging.StreamHandler[TextIO]):
    """One write for each event, and no filters."""

    def __init__(self, stream: TextIO, formatter: EventFormatter) -> None:
        super().__init__(stream)
        self.setFormatter(formatter)
        self._line = formatter.line

    def handle(self, record: logging.LogRecord) -> bool:
        try:
            self._write(self.format(record))
        except Exception:
            self.handleError(record)
        return True

    def tell(self, logger: str, message: str, fields: Mapping[str, object]) -> None:
        """Of level INFO, without a record."""
        try:
            self._write(self._line(time.time(), "INFO", logger, message, fields))
        except Exception:
            self.handleError(logging.makeLogRecord({"name": logger, "msg": message}))

    def _write(self, line: str) -> None:
        assert self.lock is not None
        with self.lock:
            self.stream.write(line + "\n")
            self.stream.flush()


def tell(log: logging.Logger, message: str, fields: Mapping[str, object]) -> None:
    """As `log.info` does, for what happens a thousand times a second: it takes a third of the time.

    Whoever calls it has looked whether `log` is enabled.
    """
    handlers = _DYNRT.handlers
    if handlers and isinstance(handlers[0], EventHandler):
        handlers[0].tell(log.name, message, fields)
    else:  # the program that embeds us has its own ways
        log.info(message, extra=fields)


class EventFormatter(logging.Formatter):
    """`12:03:04.567 INFO fleet: worker registered worker=prefill-0 pid=123`."""

    def format(self, record: logging.LogRecord) -> str:
        line = self.line(record.created, record.levelname, record.name, record.getMessage(), _fields(record))
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line

    def line(
        self, created: float, level: str, logger: str, message: str, fields: Mapping[str, object]
    ) -> str:
        clock, where = _clock(int(created)), logger.removeprefix("dynrt.")
        line = f"{clock}.{int(created % 1 * 1000):03d} {level} {where}: {message}"
        for name, value in fields.items():
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            misleads = " " in text or not text.isprintable()
            line += f" {name}={text!r}" if misleads else f" {name}={text}"
        return line


class JsonFormatter(EventFormatter):
    """`{"ts":"2026-01-31T12:03:04.567Z","level":"INFO","logger":"dynrt.fleet","msg":"worker registered","pid":123}`."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return self.line(record.created, record.levelname, record.name, record.getMessage(), fields)

    def line(
        self, created: float, level: str, logger: str, message: str, fields: Mapping[str, object]
    ) -> str:
        ts = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
        line = {
            "ts": ts.removesuffix("+00:00") + "Z",
            "level": level,
            "logger": logger,
            "msg": message,
            **{name: _short(value) for name, value in fields.items()},
        }
        return msgspec.json.encode(line, enc_hook=str).decode()


def _short(value: object) -> object:
    return round(value, SECONDS_DIGITS) if isinstance(value, float) else value


def trace_fields(traceparent: str) -> dict[str, str]:
    """What a line about a request says of its trace, if it has one."""
    return {"trace_id": trace_id_of(traceparent)} if traceparent else {}


def _fields(record: logging.LogRecord) -> dict[str, object]:
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
    handler = EventHandler(sys.stderr, JsonFormatter() if is_json else EventFormatter())
    for logger, level in ((_DYNRT, logging.INFO), (logging.getLogger("opentelemetry"), logging.WARNING)):
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
