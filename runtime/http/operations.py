"""What each route takes and answers: the table behind /openapi.json."""

from __future__ import annotations

from collections.abc import Mapping
from types import UnionType
from typing import Any

import msgspec

from dynrt.runtime.http.anthropic import types as anthropic_types
from dynrt.runtime.http.anthropic.input import COUNT_SCHEMA, MESSAGE_SCHEMA
from dynrt.runtime.http.envelope import AnthropicEnvelope, Envelope
from dynrt.runtime.http.openai import types as openai
from dynrt.runtime.http.openai.chat_options import CHAT_SCHEMA
from dynrt.runtime.http.openai.completions import COMPLETION_SCHEMA
from dynrt.runtime.http.probes import METRICS_TYPE, ServerLoad, Status, Version
from dynrt.runtime.http.responses import types as responses_types
from dynrt.runtime.http.responses.input import RESPONSE_SCHEMA
from dynrt.runtime.http.tokenize import DETOKENIZE_SCHEMA, TOKENIZE_SCHEMA, Text, Tokens
from dynrt.runtime.requests import TokenizerInfo

Struct = type[msgspec.Struct] | UnionType  # one, or one of several

UNREADY = (503,)
BODY = (400, 413, 415)
GENERATES = (*BODY, 404, 503, 504)


class Operation(msgspec.Struct, frozen=True):
    """One method of one path. Every route also has the errors that `openapi` adds: 401, 405, 431 and 500."""

    summary: str
    answer: Struct | None = None  # of a 200; None: not JSON of ours, see `media_type`
    body: Mapping[str, Any] | None = None  # the JSON Schema of the request's; None: it takes none
    event: Struct | None = None  # what each event of a stream holds; None: it never streams
    errors: tuple[int, ...] = ()
    error: Struct = Envelope
    media_type: str = "application/json"


OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/v1/models"): Operation("The models that are served", openai.ModelList),
    ("GET", "/v1/models/{model}"): Operation("One of them", openai.Model, errors=(404, 503)),
    ("POST", "/v1/chat/completions"): Operation(
        "Answer a chat", openai.ChatCompletion, CHAT_SCHEMA, openai.ChatChunk, GENERATES
    ),
    ("POST", "/v1/completions"): Operation(
        "Continue prompts", openai.Completion, COMPLETION_SCHEMA, openai.Completion, GENERATES
    ),
    ("POST", "/v1/responses"): Operation(
        "Answer a chat, in the shape of OpenAI's newer API; nothing is kept",
        responses_types.Response,
        RESPONSE_SCHEMA,
        responses_types.StreamEvent,
        GENERATES,
    ),
    ("POST", "/v1/messages"): Operation(
        "Answer a chat, in the shape of Anthropic's API",
        anthropic_types.Message,
        MESSAGE_SCHEMA,
        anthropic_types.StreamEvent,
        GENERATES,
        AnthropicEnvelope,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        "The length of the prompt that such a chat makes",
        anthropic_types.TokenCount,
        COUNT_SCHEMA,
        errors=GENERATES,
        error=AnthropicEnvelope,
    ),
    ("POST", "/v1/embeddings"): Operation("Not built", errors=(501,)),
    ("POST", "/tokenize"): Operation(
        "The tokens of a text or a chat", Tokens, TOKENIZE_SCHEMA, errors=GENERATES
    ),
    ("POST", "/detokenize"): Operation("The text of tokens", Text, DETOKENIZE_SCHEMA, errors=GENERATES),
    ("GET", "/tokenizer_info"): Operation("Special tokens and chat template", TokenizerInfo, errors=UNREADY),
    ("GET", "/health"): Operation("Whether a request could be served", Status, errors=UNREADY),
    ("GET", "/ping"): Operation("The same", Status, errors=UNREADY),
    ("POST", "/ping"): Operation("The same", Status, errors=UNREADY),
    ("GET", "/live"): Operation("Whether the process runs", Status),
    ("GET", "/ready"): Operation("Whether to send new requests here", Status, errors=UNREADY),
    ("GET", "/load"): Operation("How many generation requests are open", ServerLoad),
    ("GET", "/version"): Operation("The version of dynrt", Version),
    ("GET", "/metrics"): Operation(
        "Metrics in Prometheus' text format", errors=(504,), media_type=METRICS_TYPE
    ),
    ("GET", "/openapi.json"): Operation("This document"),
}
