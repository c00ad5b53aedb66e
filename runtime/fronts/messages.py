"""Every message between the runtime and its front processes; MessagePack, one tagged union per direction."""

from __future__ import annotations

import msgspec

from dynrt.runtime import errors
from dynrt.runtime.errors import DynrtError, OverloadedError
from dynrt.runtime.http.options import EndpointOptions
from dynrt.runtime.http_counts import HttpCounts
from dynrt.runtime.requests import GenerateOutput, GenerateRequest, ModelCard

BEAT_S = 0.5  # between a front's signs of life, and between the runtime's states


class FrontSettings(msgspec.Struct, frozen=True):
    """How one front process is set up; it reads them from its standard input, as they may hold keys."""

    name: str
    address: str  # where the runtime listens for its fronts
    host: str
    port: int
    model_path: str
    options: EndpointOptions


class Failure(msgspec.Struct, frozen=True, array_like=True):
    """A DynrtError on its way."""

    kind: str  # its class
    message: str
    param: str | None = None
    retry_after_s: int = 1

    @classmethod
    def of(cls, error: DynrtError) -> Failure:
        retry_after_s = error.retry_after_s if isinstance(error, OverloadedError) else 1
        return cls(type(error).__name__, error.message, error.param, retry_after_s)

    def error(self) -> DynrtError:
        kind: type[DynrtError] = getattr(errors, self.kind)
        if issubclass(kind, OverloadedError):
            return kind(self.message, retry_after_s=self.retry_after_s)
        return kind(self.message, param=self.param)


# --- front to runtime -----------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The front is there; answer with a State."""


class Listening(msgspec.Struct, frozen=True, tag=True):
    """It takes connections."""


class Beat(msgspec.Struct, frozen=True, tag=True):
    """Its event loop runs; and what it has answered since the last one."""

    counts: HttpCounts = HttpCounts()


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Serve a request; `number` is the front's own, never used again."""

    number: int
    request: GenerateRequest


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Nobody waits for this request any more."""

    number: int


class MetricsWanted(msgspec.Struct, frozen=True, tag=True):
    """Answer with MetricsText."""

    number: int


FromFront = Hello | Listening | Beat | Generate | Leave | MetricsWanted


# --- runtime to front -----------------------------------------------------------------------------


class State(msgspec.Struct, frozen=True, tag=True):
    """What is served, and why not. Sent when it changes and every BEAT_S."""

    cards: list[ModelCard]
    why_not_ready: str | None
    is_draining: bool
    is_ending: bool  # load balancers should turn elsewhere; requests are still taken


class Item(msgspec.Struct, frozen=True, array_like=True):
    """News of one request: an output, or its failure, or, most of the time, just events."""

    number: int
    chunk: bytes = b""  # see Frame.chunk
    token_id: int = 0  # whose event it is
    output: GenerateOutput | None = None
    failure: Failure | None = None


class Items(msgspec.Struct, frozen=True, tag=True):
    """One message for all that happened in one turn of the loop: mostly an engine's step."""

    items: list[Item]


class MetricsText(msgspec.Struct, frozen=True, tag=True):
    number: int
    text: bytes


class Reload(msgspec.Struct, frozen=True, tag=True):
    """Read keys and certificate again."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take nothing new, finish what is open within `limit_s`, and end."""

    limit_s: float


ToFront = State | Items | MetricsText | Reload | Drain

encode = msgspec.msgpack.Encoder().encode
decode_from_front = msgspec.msgpack.Decoder(FromFront).decode
decode_to_front = msgspec.msgpack.Decoder(ToFront).decode
