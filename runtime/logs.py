"""One structured line per event, on standard error."""

from __future__ import annotations

import logging
import sys
import time

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class EventFormatter(logging.Formatter):
    """`12:03:04.567 INFO fleet: worker registered worker=prefill-0 pid=123`."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        where = record.name.removeprefix("dynrt.")
        line = f"{clock}.{int(record.msecs):03d} {record.levelname} {where}: {record.getMessage()}"
        fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if fields:
            line += " " + " ".join(f"{name}={_show(value)}" for name, value in fields.items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _show(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return repr(text) if " " in text or not text.isprintable() else text


def set_up_logs(level: int = logging.INFO) -> None:
    """For processes that are dynrt's own; a program that embeds the runtime keeps its own logging."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(EventFormatter())
    logger = logging.getLogger("dynrt")
    logger.handlers[:] = [handler]
    logger.setLevel(level)
    logger.propagate = False
