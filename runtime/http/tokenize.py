"""POST /tokenize and /detokenize, GET /tokenizer_info: the model's tokenizer for clients that count or cut prompts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from dynrt.runtime.http.backend import BACKEND, Backend
from dynrt.runtime.http.body import read_object
from dynrt.runtime.http.chat import read_template_kwargs
from dynrt.runtime.http.conversation import read_messages
from dynrt.runtime.http.fields import Fields, Problems
from dynrt.runtime.http.model_limits import check_vocabulary
from dynrt.runtime.http.models import find_model, json_response
from dynrt.runtime.http.parameters import MAX_NAME_CHARS
from dynrt.runtime.http.sampling import are_token_ids
from dynrt.runtime.messages import pack_ids, unpack_ids

Encode = Callable[[Backend], Awaitable[bytes]]


TOKENIZE_SCHEMA = {
    "type": "object",
    "description": "A text (prompt) or a chat (messages).",
    "anyOf": [{"required": ["prompt"]}, {"required": ["messages"]}],
    "properties": {
        "model": {"type": "string", "description": "May be left out: the one that is served."},
        "prompt": {"type": "string"},
        "add_special_tokens": {"type": "boolean", "default": True, "description": "Of a text only."},
        "messages": {"type": "array", "items": {"type": "object"}, "minItems": 1},
        "add_generation_prompt": {"type": "boolean", "default": True},
        "chat_template_kwargs": {"type": "object"},
        "return_token_strs": {"type": "boolean", "default": False},
    },
}
DETOKENIZE_SCHEMA = {
    "type": "object",
    "required": ["tokens"],
    "properties": {
        "model": {"type": "string"},
        "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    },
}


class Tokens(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None  # where asked for


class Text(msgspec.Struct, frozen=True):
    prompt: str


async def tokenize(request: web.Request) -> web.Response:
    fields = Fields(await read_object(request), Problems())
    model = fields.string("model", "", MAX_NAME_CHARS)
    with_names = fields.boolean("return_token_strs", False)
    encode = _read_chat(fields) if "messages" in fields.values else _read_text(fields)
    fields.problems.raise_if_any()
    backend = request.app[BACKEND]
    card = find_model(backend, model)
    packed = await encode(backend)
    names = await backend.token_names(packed) if with_names else None
    return json_response(Tokens(len(packed) // 4, card.context_length, list(unpack_ids(packed)), names))


def _read_text(fields: Fields) -> Encode:
    text = fields.values.get("prompt")
    if not isinstance(text, str):
        fields.refuse("prompt", "it must be a string, or messages be there instead")
    add_special_tokens = fields.boolean("add_special_tokens", True)
    return lambda backend: backend.encode(str(text), add_special_tokens=add_special_tokens)


def _read_chat(fields: Fields) -> Encode:
    messages = read_messages(fields)
    add_generation_prompt = fields.boolean("add_generation_prompt", True)
    template_kwargs = read_template_kwargs(fields)
    return lambda backend: backend.encode_chat(
        messages, add_generation_prompt=add_generation_prompt, template_kwargs=template_kwargs
    )


async def detokenize(request: web.Request) -> web.Response:
    fields = Fields(await read_object(request), Problems())
    model = fields.string("model", "", MAX_NAME_CHARS)
    token_ids = fields.values.get("tokens")
    if not isinstance(token_ids, list) or not are_token_ids(token_ids):
        fields.refuse("tokens", "it must be a list of token ids, none negative")
        token_ids = []
    fields.problems.raise_if_any()
    backend = request.app[BACKEND]
    check_vocabulary(token_ids, find_model(backend, model), "tokens")
    return json_response(Text(await backend.decode(pack_ids(token_ids), skip_special_tokens=False)))


async def tokenizer_info(request: web.Request) -> web.Response:
    return json_response(request.app[BACKEND].tokenizer_info())
