"""What users of the runtime hand in and get back: the structs between endpoint, CLI, embedders and runtime."""

from __future__ import annotations

from typing import Literal

import msgspec

from dynrt.runtime.messages import FinishReason, Frame, SamplingParams, TokenLogprob

LocalPrefill = Literal["auto", "never", "always"]
Operation = Literal["chat", "text_completion"]  # OpenTelemetry's words


class GenerateRequest(msgspec.Struct, frozen=True):
    """One prompt to be continued. `prompt_ids` are packed little-endian uint32 (see messages.pack_ids)."""

    prompt_ids: bytes
    sampling: SamplingParams
    model: str = ""  # empty: the one model served
    request_id: str = ""  # for logs; the runtime makes one if empty
    salt: str = ""  # requests of different salts never share cached KV
    seeded: bool = False  # False: the runtime draws sampling.seed
    priority: int = 0
    traceparent: str = ""  # a valid one (W3C trace context), if the request belongs to a trace
    operation: Operation = "text_completion"  # for traces
    local_prefill: LocalPrefill | None = None  # None: as configured
    frame: Frame | None = None  # its outputs have `frames` instead of `text`


class GenerateOutput(msgspec.Struct, frozen=True):
    """News of a request since the last output: the new tokens and their text, coalesced if the reader is slow."""

    token_ids: list[int]
    text: str
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cached_tokens: int = 0  # prompt tokens whose KV was not computed for this request
    logprobs: list[TokenLogprob] | None = None  # one for each of token_ids, if asked for
    prompt_logprobs: list[TokenLogprob | None] | None = None  # once, with the first output
    frames: bytes = b""  # the text as events, each within GenerateRequest.frame


class TokenizerInfo(msgspec.Struct, frozen=True):
    """What a client must know to prepare prompts itself. Tokens that the model does not have are None."""

    vocab_size: int
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None
    chat_template: str | None  # in Jinja's language
    tool_template: str | None = None  # of chats that offer tools, where the model has another one for them


class ModelCard(msgspec.Struct, frozen=True):
    """What is served."""

    name: str
    created: int  # unix seconds
    context_length: int
    vocab_size: int  # token ids are below it
    takes_grammar: bool = False  # sampling.grammar is obeyed by every worker
