"""The control-plane schema: every message between the runtime and an engine process.

MessagePack, one tagged union per direction. A change here changes all users at once.
Handoff and cache messages are defined by the state machines that consume them (transfer.events, planner.events).
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec

from dynrt.planner.events import CacheEvents, CacheSnapshot
from dynrt.runtime.chunks import as_chunk, data_of
from dynrt.transfer.events import (
    Arm,
    CancelHandoff,
    Committed,
    ConnectPeer,
    Drained,
    FencePeer,
    FirstToken,
    LeaseExpired,
    PeerConnected,
    PeerQuiesced,
    Quiesced,
    RenewLease,
    Reserved,
    ReserveRefused,
    Retarget,
    Sent,
    Stalled,
)
from dynrt.transfer.layout import KvGeometry

PROTOCOL_VERSION = (
    1  # raised by the first change of a message after a release: engines may come from elsewhere
)
ADDRESS_KEY_SEPARATOR = "#"  # a tcp control address carries the runtime's CURVE public key behind it
HEARTBEAT_SUFFIX = ".hb"  # a heartbeat socket's identity is the incarnation with this behind it

Role = Literal["prefill", "decode", "both"]
Purpose = Literal["generate", "prefill", "reserve"]
KvConnector = Literal["layerwise", "nixl-pull"]  # who moves KV: our push, or vLLM's own NixlConnector
FinishReason = Literal["stop", "length", "cancelled", "error"]


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, the form in which prompts travel."""
    packed = array("I", token_ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    token_ids = array("I", packed)
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tolist()


class Grammar(msgspec.Struct, frozen=True):
    """What the output must look like. Only engines that say so in Register take one.

    `spec`: a JSON schema ("json_schema"), empty ("json_object"), a regular expression, a JSON list of strings
    ("choice"), or an EBNF grammar.
    """

    kind: Literal["json_object", "json_schema", "regex", "choice", "grammar"]
    spec: str = ""


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are chosen and when to stop; validated at the door, complete when it reaches an engine."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off; else the least probability, as a share of the likeliest token's
    seed: int = 0  # always set by the runtime; a token depends on (seed, its position in the output) only
    presence_penalty: float = 0.0  # subtracted from the logit of each token that the output has
    frequency_penalty: float = 0.0  # subtracted for each time that the output has it
    repetition_penalty: float = (
        1.0  # divides positive logits of tokens in prompt or output, multiplies negative
    )
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    logprobs: int | None = (
        None  # with each token its log probability and so many likeliest ones; None: without
    )
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    grammar: Grammar | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    shown_special_tokens: tuple[str, ...] = ()  # control tokens that are text here: they begin calls of tools


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """The constant bytes of a stream event, before and behind the JSON string of its text.

    A request that has one gets ready events from its engine; whoever streams them need not know the text.
    """

    prefix: bytes
    suffix: bytes

    def around(self, text: str) -> bytes:
        """The event that tells `text`."""
        return self.prefix + msgspec.json.encode(text) + self.suffix

    def chunk(self, text: str) -> bytes:
        """The same as a chunk of a body of HTTP/1.1; no text makes none."""
        return as_chunk(self.around(text)) if text else b""


# --- runtime to engine ----------------------------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Registration accepted."""

    runtime_id: str
    worker_id: str
    heartbeat_interval_s: float


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Registration refused for good; the engine exits."""

    reason: str


class Unknown(msgspec.Struct, frozen=True, tag=True):
    """This runtime does not know the sender: drop what an earlier runtime asked for, and register."""


class Submit(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Run a request. `output_ids` were generated before (by another worker): go on behind them.

    purpose "generate": prefill and decode here. "prefill": sample one token, keep the KV for the handoff
    (key, epoch). "reserve": set blocks aside for that handoff and answer Reserved or ReserveRefused.
    """

    key: bytes
    epoch: int
    purpose: Purpose
    prompt_ids: bytes
    sampling: SamplingParams
    output_ids: bytes = b""
    chars_emitted: int = 0
    salt: str = ""
    lease_s: float = 30.0
    peer: str = ""  # purpose "reserve": the incarnation that will push
    frame: Frame | None = None  # text goes out as events
    number: int = 0  # the attempt's, for TextDelta: a runtime gives none twice
    traceparent: str = ""  # of the trace that the request belongs to, for log lines about it
    kv_transfer_params: bytes = b""  # to "nixl-pull": where the prompt's KV is, as prefill's TokenDelta told


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """The client is gone, or the request moved: end it wherever it is, silently, and free what it holds."""

    key: bytes
    epoch: int


class SnapshotRequest(msgspec.Struct, frozen=True, tag=True):
    """Answer with a CacheSnapshot."""


class StatusRequest(msgspec.Struct, frozen=True, tag=True):
    """Answer with a Status; asked by operators and tests."""

    token: int


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """End the process in good order."""


ToEngine = (
    Welcome
    | Refused
    | Unknown
    | Submit
    | Cancel
    | SnapshotRequest
    | StatusRequest
    | Shutdown
    | Arm
    | Retarget
    | FirstToken
    | RenewLease
    | PeerQuiesced
    | CancelHandoff
    | FencePeer
    | ConnectPeer
)


# --- engine to runtime ----------------------------------------------------------------------------


class Register(msgspec.Struct, frozen=True, tag=True):
    """The first message of an engine; repeated until it is answered, and after the runtime came back."""

    protocol_version: int
    incarnation: str
    spawn_token: str  # given by the spawner on the command line; empty when the engine joined by itself
    role: Role
    engine_kind: str
    model: str
    context_length: int
    vocab_size: int
    geometry: list[KvGeometry]  # one per rank
    agent_metadata: list[bytes]
    region_addresses: list[list[int]]
    first_token_from: Literal["prefill", "decode"]
    takes_grammar: bool
    pid: int
    host: str
    version: str
    kv_connector: KvConnector = "layerwise"


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """From the heartbeat thread: the process runs, and for how long its other threads have been at one thing."""

    incarnation: str
    step_age_s: float  # the compute thread in one step
    transfer_age_s: float = 0.0  # the transfer thread in one turn of its loop


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The log probability of a token under the model's own distribution: after logit bias and penalties, before
    temperature and truncation. `top`: (token id, log probability), likeliest first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class TokenDelta(msgspec.Struct, frozen=True, array_like=True):
    """What one step added to one request."""

    key: bytes
    epoch: int
    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int | None = None  # with a request's first delta: prompt tokens not computed here
    error: str | None = None
    logprobs: list[TokenLogprob] | None = None  # one for each of token_ids, if asked for
    prompt_logprobs: list[TokenLogprob | None] | None = None  # with the first delta: None for the first token
    frames: bytes = b""  # instead of `text`, where Submit has a frame: one event if there is text
    frame_chars: int = 0  # characters of text in them
    admitted_at: float | None = None  # with the first: CLOCK_MONOTONIC when its prompt's first step began
    is_refusal: bool = False  # with an error: the request itself is wrong
    kv_transfer_params: bytes = b""  # of "nixl-pull", with prefill's token: vLLM's own, opaque here

    @property
    def num_chars(self) -> int:
        """Characters of text that the client gets with it."""
        return len(self.text) + self.frame_chars


class TextDelta(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A TokenDelta that says nothing but one token's text as an event: what most steps add to most streams.

    It has few fields, and its event is ready to be written, as hardly anything else is done for a token.
    """

    number: int  # of its Submit
    token_id: int
    chunk: bytes  # see Frame.chunk
    num_chars: int

    def whole(self, key: bytes, epoch: int) -> TokenDelta:
        """The same of this attempt with all fields."""
        frames = data_of(self.chunk) if self.chunk else b""
        return TokenDelta(key, epoch, [self.token_id], "", frames=frames, frame_chars=self.num_chars)


class EngineLoad(msgspec.Struct, frozen=True, array_like=True):
    """A worker's load after a step."""

    waiting_requests: int = 0
    running_requests: int = 0
    blocks_total: int = 0
    blocks_active: int = 0  # held by requests, reservations or pins
    blocks_cached: int = 0  # unused, but their content is kept
    preemptions_total: int = 0


class StepTiming(msgspec.Struct, frozen=True, array_like=True):
    """One step, for the planner's coefficients."""

    duration_s: float
    ended_at: float  # CLOCK_MONOTONIC of the engine's host
    prefill_tokens: int
    prefill_context: int  # sum over chunks of end² - start² (attention's share)
    decode_requests: int
    decode_kv_tokens: int


class StepReport(msgspec.Struct, frozen=True, tag=True):
    """One message per engine step: the results of all its requests.

    `texts` has at most one of each request, which came before all that `deltas` has.
    """

    deltas: list[TokenDelta]
    load: EngineLoad
    timing: StepTiming | None
    cache: CacheEvents | None = None
    texts: list[TextDelta] = []


class Status(msgspec.Struct, frozen=True, tag=True):
    """An engine's inside, for tests that prove nothing leaked."""

    token: int
    load: EngineLoad
    open_handoffs: int
    requests: int
    open_fds: int
    threads: int
    rss_bytes: int


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """The engine ends in good order; `error` says why if nobody asked it to."""

    incarnation: str
    error: str | None = None


FromEngine = (
    Register
    | Heartbeat
    | StepReport
    | Status
    | Goodbye
    | CacheEvents
    | CacheSnapshot
    | PeerConnected
    | Sent
    | Quiesced
    | Stalled
    | Reserved
    | ReserveRefused
    | Committed
    | Drained
    | LeaseExpired
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
