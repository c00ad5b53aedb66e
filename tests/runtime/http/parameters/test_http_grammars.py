"""What the answer must look like: what of it reaches engines that can follow it, and what others refuse."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import msgspec
import pytest
from scripted_backend import ScriptedBackend, chat

from dynrt.runtime.messages import Grammar

CHAT = "/v1/chat/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

FORMATS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None}, None),
    ({"structured_outputs": {}}, None),
    ({"structured_outputs": {"json_object": False, "regex": None}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
            }
        },
        Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
    ),
    (
        {"structured_outputs": {"json": SCHEMA}},
        Grammar("json_schema", json.dumps(SCHEMA, separators=(",", ":"))),
    ),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar("json_schema", json.dumps(SCHEMA))),
    ({"structured_outputs": {"regex": "[ab]+"}}, Grammar("regex", "[ab]+")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, Grammar("choice", '["yes","no"]')),
    ({"structured_outputs": {"grammar": 'start: "a"+'}}, Grammar("grammar", 'start: "a"+')),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
]


def takes_grammar(backend: ScriptedBackend) -> None:
    [card] = backend.cards
    backend.cards = [msgspec.structs.replace(card, takes_grammar=True)]


@pytest.mark.parametrize(("asked", "grammar"), FORMATS)
async def test_grammars_reach_engines_that_take_them(
    client: aiohttp.ClientSession, backend: ScriptedBackend, asked: dict[str, Any], grammar: Grammar | None
) -> None:
    takes_grammar(backend)
    async with client.post(CHAT, json=chat(**asked)) as response:
        assert response.status == 200, await response.text()
    assert backend.requests[0].sampling.grammar == grammar


@pytest.mark.parametrize("asked", [asked for asked, grammar in FORMATS if grammar is not None])
async def test_engines_that_take_none_say_so(client: aiohttp.ClientSession, asked: dict[str, Any]) -> None:
    async with client.post(CHAT, json=chat(**asked)) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert [error["param"]] == list(asked) and "native or vllm" in error["message"]


@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}},
        {"structured_outputs": {"regex": "a("}},
        {"structured_outputs": {"grammar": "start: x"}},
    ],
)
async def test_what_is_no_grammar_is_the_requests_fault(
    client: aiohttp.ClientSession, backend: ScriptedBackend, asked: dict[str, Any]
) -> None:
    takes_grammar(backend)
    async with client.post(CHAT, json=chat(**asked)) as response:
        assert response.status == 400
        assert [(await response.json())["error"]["param"]] == list(asked)
    assert not backend.requests
