"""The Engine protocol: what an engine process needs from whatever computes in it.

All methods are called from the compute thread. `submit`, `cancel`, `reserve`, `commit`, `release` come between
steps and never block; results come out of `step`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec

from dynrt.planner.events import BlocksStored, CacheEvent
from dynrt.runtime.messages import (
    EngineLoad,
    FinishReason,
    KvConnector,
    SamplingParams,
    StepTiming,
    Submit,
    TokenLogprob,
    unpack_ids,
)
from dynrt.transfer.layout import KvGeometry
from dynrt.transfer.local import BlocksReady
from dynrt.transfer.memory import RankMemory


class EngineInfo(msgspec.Struct, frozen=True):
    """What an engine is, fixed from its construction."""

    kind: str  # "native", "vllm" or "sim"
    context_length: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    geometry: list[KvGeometry]  # one per rank
    first_token_from: Literal["prefill", "decode"] = (
        "prefill"  # "decode": it cannot take one; samples it itself
    )
    takes_grammar: bool = False  # sampling.grammar is obeyed
    kv_connector: KvConnector = "layerwise"  # else its KV is no business of the transfer thread's


class EngineRequest(msgspec.Struct, frozen=True):
    """One request as an engine sees it. `output_ids` were generated elsewhere and are computed like prompt tokens."""

    key: bytes
    epoch: int
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    output_ids: Sequence[int] = ()
    salt: str = ""
    prefill_only: bool = False  # sample one token, then stop; keep the blocks pinned until `release`
    kv_transfer_params: bytes = b""  # as in Submit

    @classmethod
    def of(cls, submit: Submit) -> EngineRequest:
        return cls(
            key=submit.key,
            epoch=submit.epoch,
            prompt_ids=unpack_ids(submit.prompt_ids),
            sampling=submit.sampling,
            output_ids=unpack_ids(submit.output_ids),
            salt=submit.salt,
            prefill_only=submit.purpose == "prefill",
            kv_transfer_params=submit.kv_transfer_params,
        )


class Reservation(msgspec.Struct, frozen=True):
    """Blocks set aside for a prompt whose KV will be pushed here."""

    first_block: int  # blocks before this one are this engine's own prefix hit, pinned
    block_ids: list[int]  # of prompt blocks first_block, first_block + 1, …


class Token(msgspec.Struct, frozen=True):
    """One sampled token. `finish_reason` is set by what tokens alone can tell (end of sequence, stop id, length)."""

    key: bytes
    epoch: int
    token_id: int  # -1 with an error
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id that ended it, end of sequence excepted
    cached_tokens: int | None = None  # with the request's first token here
    error: str | None = None  # finish_reason "error": the engine cannot go on with this request
    is_refusal: bool = (
        False  # with an error: the request itself is wrong, no engine of this kind would run it
    )
    logprob: TokenLogprob | None = None  # if sampling.logprobs is not None
    prompt_logprobs: list[TokenLogprob | None] | None = None  # with the first token, if asked for
    admitted_at: float | None = None  # with it: time.monotonic() when its prompt's first step began
    kv_transfer_params: bytes = b""  # as in TokenDelta

    @property
    def is_plain(self) -> bool:
        """It is not the first of its request here, and nothing else was asked about it."""
        return (
            self.cached_tokens is None
            and self.logprob is None
            and self.prompt_logprobs is None
            and self.admitted_at is None
            and not self.kv_transfer_params
        )


class StepOutput(msgspec.Struct, frozen=True):
    """What one step brought."""

    tokens: list[Token]
    cache_events: list[CacheEvent]
    load: EngineLoad
    timing: StepTiming | None  # None: nothing was computed


class LayerHook(Protocol):
    """Told by `step` how the KV of prefill_only requests grows. Must return at once: compute waits for it."""

    def step_begins(self, ready: list[BlocksReady]) -> None:
        """The blocks that this step completes. Called in every step that has some, before any layer."""

    def layer_written(self, layer: int, event: object | None) -> None:
        """Layer's KV of this step is in the cache (CUDA: once `event` has happened), before its attention ran."""


class Engine(Protocol):
    """See the module."""

    @property
    def info(self) -> EngineInfo: ...

    def kv_memory(self) -> Sequence[RankMemory]:
        """Per rank: what is to be registered for transfers."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Whatever is wrong with it comes back as a Token with an error."""

    def cancel(self, key: bytes, epoch: int) -> None:
        """Forget a request; a prefill_only one keeps its announced blocks pinned until `release`. Unknown: no-op."""

    def reserve(self, request: EngineRequest) -> Reservation | None:
        """Set blocks aside for the whole prompt, own prefix hit pinned; held until commit or release.

        None: no room now. Raises InvalidRequestError, with nothing held, if the request can never run here.
        """

    def commit(self, key: bytes, epoch: int, first_token: int | None) -> None:
        """The reserved blocks are filled: decode on behind `first_token`; None if this engine samples it."""

    def release(self, key: bytes, epoch: int) -> None:
        """Give back a reservation, or unpin a prefill_only request's source blocks. Unknown: no-op."""

    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    def step(self, hook: LayerHook) -> StepOutput:
        """Schedule, compute, sample once."""

    def load(self) -> EngineLoad:
        """Of this moment."""

    def cache_snapshot(self) -> list[BlocksStored]:
        """Everything in the prefix cache, parents before children."""

    def close(self) -> None:
        """Free the memory."""
