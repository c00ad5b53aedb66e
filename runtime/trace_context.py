"""The W3C header that ties a request to the trace of its client: https://www.w3.org/TR/trace-context."""

from __future__ import annotations

import re

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")


def valid_traceparent(header: str) -> str:
    """`header` if it is a traceparent, else nothing: a broken one is to be ignored."""
    return header if _TRACEPARENT.fullmatch(header) else ""


def trace_id_of(traceparent: str) -> str:
    """Of a valid traceparent; nothing of none."""
    return traceparent[3:35]
