"""POST /v1/completions: continues one prompt, given as text or as token ids."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from dynrt.runtime.http.backend import BACKEND, Backend
from dynrt.runtime.http.body import read_object
from dynrt.runtime.http.fields import Fields, Problems
from dynrt.runtime.http.models import find_model
from dynrt.runtime.http.parameters import are_token_ids, check_vocabulary, complete_sampling, read_parameters
from dynrt.runtime.http.replies import TextReply
from dynrt.runtime.http.serve import Job, make_job, serve
from dynrt.runtime.http.unsupported import COMPLETIONS, refuse_unsupported
from dynrt.runtime.messages import pack_ids
from dynrt.runtime.requests import ModelCard

DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    return await serve(request, _prepare)


async def _prepare(request: web.Request) -> Job:
    fields = Fields(await read_object(request), Problems())
    prompt = read_prompt(fields)
    asked = read_parameters(fields)
    add_special_tokens = fields.boolean("add_special_tokens", True)
    refuse_unsupported(fields, COMPLETIONS)
    fields.problems.raise_if_any()
    card = find_model(request.app[BACKEND], asked.model)
    prompt_ids = await _prompt_ids(request.app[BACKEND], card, prompt, add_special_tokens)
    sampling = complete_sampling(
        asked, card, len(prompt_ids) // 4, prompt_param="prompt", default_max_tokens=DEFAULT_MAX_TOKENS
    )
    return make_job(request, asked, card, prompt_ids, sampling, TextReply)


def read_prompt(fields: Fields) -> str | list[int]:
    """The one prompt: a string or a list of token ids, either also as the only element of a list."""
    prompt: Any = fields.values.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            fields.refuse(
                "prompt", "it must be one prompt, as several are not supported yet; send a request for each"
            )
            return ""
        prompt = prompt[0]
    if isinstance(prompt, str) and prompt:
        return prompt
    if isinstance(prompt, list) and prompt and are_token_ids(prompt):
        return prompt
    fields.refuse("prompt", "it must be a string or a list of token ids, not empty and no id negative")
    return ""


async def _prompt_ids(
    backend: Backend, card: ModelCard, prompt: str | list[int], add_special_tokens: bool
) -> bytes:
    if isinstance(prompt, str):
        return await backend.encode(prompt, add_special_tokens=add_special_tokens)
    check_vocabulary(prompt, card, "prompt")
    return pack_ids(prompt)
