"""POST /v1/completions: continues prompts, each given as text or as token ids."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from dynrt.runtime.http.backend import BACKEND, Backend
from dynrt.runtime.http.body import read_object
from dynrt.runtime.http.fields import Fields, Problems, shown
from dynrt.runtime.http.models import find_model
from dynrt.runtime.http.parameters import (
    MAX_CHOICES,
    are_token_ids,
    check_vocabulary,
    complete_sampling,
    read_parameters,
)
from dynrt.runtime.http.replies import TextReply
from dynrt.runtime.http.serve import Job, make_job, serve
from dynrt.runtime.http.unsupported import COMPLETIONS, refuse_unsupported
from dynrt.runtime.messages import pack_ids
from dynrt.runtime.requests import ModelCard

DEFAULT_MAX_TOKENS = 16

Prompt = str | list[int]


async def completions(request: web.Request) -> web.StreamResponse:
    return await serve(request, _prepare)


async def _prepare(request: web.Request) -> Job:
    fields = Fields(await read_object(request), Problems())
    prompts = read_prompts(fields)
    asked = read_parameters(fields)
    add_special_tokens = fields.boolean("add_special_tokens", True)
    refuse_unsupported(fields, COMPLETIONS)
    _check_choices(fields, len(prompts), asked.n)
    fields.problems.raise_if_any()
    backend = request.app[BACKEND]
    card = find_model(backend, asked.model)
    packed = [await _prompt_ids(backend, card, prompt, add_special_tokens) for prompt in prompts]
    samplings = [
        complete_sampling(
            asked, card, len(ids) // 4, prompt_param="prompt", default_max_tokens=DEFAULT_MAX_TOKENS
        )
        for ids in packed
    ]
    return make_job(request, asked, card, list(zip(packed, samplings, strict=True)), TextReply)


def read_prompts(fields: Fields) -> list[Prompt]:
    """One prompt or a list of them, each a string or a list of token ids; none if they are refused."""
    prompt: Any = fields.values.get("prompt")
    is_batch = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    prompts = prompt if is_batch else [prompt]
    if len(prompts) > MAX_CHOICES:
        fields.refuse("prompt", f"it must be at most {MAX_CHOICES} prompts")
        return []
    for index, one in enumerate(prompts):
        if not _is_prompt(one):
            param = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
            rule = "it must be a string or a list of token ids, not empty and no id negative"
            fields.problems.add(param, f"{param} is {shown(one)}; {rule}")
    return prompts


def _is_prompt(value: Any) -> bool:
    return bool(value) and (isinstance(value, str) or (isinstance(value, list) and are_token_ids(value)))


def _check_choices(fields: Fields, num_prompts: int, n: int) -> None:
    if num_prompts * n > MAX_CHOICES:
        fields.refuse("n", f"it must be at most {MAX_CHOICES // num_prompts} with {num_prompts} prompts")


async def _prompt_ids(backend: Backend, card: ModelCard, prompt: Prompt, add_special_tokens: bool) -> bytes:
    if isinstance(prompt, str):
        return await backend.encode(prompt, add_special_tokens=add_special_tokens)
    check_vocabulary(prompt, card, "prompt")
    return pack_ids(prompt)
