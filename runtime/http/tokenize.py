"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer for clients that count or cut prompts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from dynrt.runtime.http.backend import Backend
from dynrt.runtime.http.body import read_object
from dynrt.runtime.http.models import find_model
from dynrt.runtime.http.openai.chat import encode_conversation, read_conversation
from dynrt.runtime.http.openai.chat_options import CONVERSATION
from dynrt.runtime.http.parameters.fields import Fields, Problems
from dynrt.runtime.http.parameters.model_limits import check_vocabulary
from dynrt.runtime.http.parameters.request_schema import Parameter, body_schema, boolean
from dynrt.runtime.http.parameters.sampling import are_token_ids
from dynrt.runtime.http.parameters.shared import MODEL
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import Response, json_response
from dynrt.runtime.messages import pack_ids, unpack_ids

Encode = Callable[[Backend], Awaitable[bytes]]


class Tokens(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None  # where asked for


class Text(msgspec.Struct, frozen=True):
    prompt: str


async def tokenize(request: Request) -> Response:
    fields = Fields(await read_object(request), Problems())
    model, with_names = MODEL.read(fields), WITH_NAMES.read(fields)
    encode = _read_chat(fields) if "messages" in fields.values else _read_text(fields)
    fields.problems.raise_if_any()
    backend = request.endpoint.backend
    card = find_model(backend, model)
    packed = await encode(backend)
    names = await backend.token_names(packed) if with_names else None
    return json_response(Tokens(len(packed) // 4, card.context_length, list(unpack_ids(packed)), names))


def _read_text(fields: Fields) -> Encode:
    text, add_special_tokens = PROMPT.read(fields), ADD_SPECIAL_TOKENS.read(fields)
    return lambda backend: backend.encode(text, add_special_tokens=add_special_tokens)


def _read_chat(fields: Fields) -> Encode:
    conversation = read_conversation(fields)
    return lambda backend: encode_conversation(backend, conversation)


async def detokenize(request: Request) -> Response:
    fields = Fields(await read_object(request), Problems())
    model, token_ids = MODEL.read(fields), TOKENS.read(fields)
    fields.problems.raise_if_any()
    backend = request.endpoint.backend
    check_vocabulary(token_ids, find_model(backend, model), "tokens")
    return json_response(Text(await backend.decode(pack_ids(token_ids), skip_special_tokens=False)))


async def tokenizer_info(request: Request) -> Response:
    return json_response(request.endpoint.backend.tokenizer_info())


def _read_prompt(fields: Fields) -> str:
    text = fields.values.get("prompt")
    if isinstance(text, str):
        return text
    fields.refuse("prompt", "it must be a string, or messages be there instead")
    return ""


def _read_tokens(fields: Fields) -> list[int]:
    token_ids = fields.values.get("tokens")
    if isinstance(token_ids, list) and are_token_ids(token_ids):
        return token_ids
    fields.refuse("tokens", "it must be a list of token ids, none negative")
    return []


WITH_NAMES = boolean("return_token_strs", "Also each token as the vocabulary spells it.", False)
PROMPT = Parameter[str](
    "prompt", "A text; a chat has messages instead.", {"type": "string"}, _read_prompt, "", required=True
)
ADD_SPECIAL_TOKENS = boolean("add_special_tokens", "To a text, as the tokenizer does by itself.", True)
TOKENS = Parameter[list[int]](
    "tokens",
    "Token ids.",
    {"type": "array", "items": {"type": "integer", "minimum": 0}},
    _read_tokens,
    [],
    required=True,
)

TOKENIZE_SCHEMA = body_schema(
    "TokenizeRequest",
    "A text or a chat.",
    (MODEL, PROMPT, ADD_SPECIAL_TOKENS, *CONVERSATION, WITH_NAMES),
    needs_one=True,
)
DETOKENIZE_SCHEMA = body_schema("DetokenizeRequest", "Tokens to be spelled.", (MODEL, TOKENS))
