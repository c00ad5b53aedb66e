"""Traces of requests: what the runtime tells them."""

from __future__ import annotations

from typing import Protocol

from dynrt.runtime.errors import ConfigError
from dynrt.runtime.request_metrics import EndedRequest
from dynrt.runtime.requests import GenerateRequest


class Trace(Protocol):
    """Of one request."""

    traceparent: str  # for whoever works on it

    def end(self, ended: EndedRequest, error: BaseException | None) -> None:
        """Called once, when all times are known. `error`: what the request failed with."""


class Tracing(Protocol):
    """Begins traces; `close` waits a moment for what is not yet told."""

    def begin(self, request: GenerateRequest, began_at: float) -> Trace | None:
        """None: nothing is recorded of it, and what the client sent is passed on."""

    def close(self) -> None: ...


class NoTracing:
    def begin(self, request: GenerateRequest, began_at: float) -> None:
        return None

    def close(self) -> None:
        pass


def open_tracing(endpoint: str | None) -> Tracing:
    """To an OTLP receiver at `endpoint`, a URL such as http://127.0.0.1:4318. Raises ConfigError."""
    if endpoint is None:
        return NoTracing()
    try:
        from dynrt.runtime.otel import otlp_tracing
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        raise ConfigError(
            f"traces are to go to {endpoint} and OpenTelemetry is not installed here: pip install 'dynrt[otel]'"
        ) from error
    return otlp_tracing(endpoint)
