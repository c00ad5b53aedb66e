"""The JSON schemas of the bodies: of the parameters that are read, and of the limits that are kept."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest
from scripted_backend import chat, text

from dynrt.runtime.http.openai.chat_options import CHAT_SCHEMA
from dynrt.runtime.http.openai.completions import COMPLETION_SCHEMA
from dynrt.runtime.http.parameters import unsupported
from dynrt.runtime.http.parameters.sampling import SAMPLING
from dynrt.runtime.messages import SamplingParams

ENDPOINTS = {
    "/v1/chat/completions": (CHAT_SCHEMA, chat, unsupported.CHAT),
    "/v1/completions": (COMPLETION_SCHEMA, text, unsupported.COMPLETIONS),
}


def out_of_limits() -> list[tuple[str, str, Any]]:
    """A value just over each limit that a schema names."""
    values = []
    for path, (schema, _, _) in ENDPOINTS.items():
        for name, limits in schema["properties"].items():
            if "minimum" in limits:
                values.append((path, name, limits["minimum"] - 1))
            if "maximum" in limits:
                values.append((path, name, limits["maximum"] + 1))
            if "maxLength" in limits:
                values.append((path, name, "x" * (limits["maxLength"] + 1)))
    return values


@pytest.mark.parametrize(("path", "name", "value"), out_of_limits())
async def test_the_limits_are_those_that_are_kept(
    client: aiohttp.ClientSession, path: str, name: str, value: Any
) -> None:
    _, body, _ = ENDPOINTS[path]
    async with client.post(path, json=body(**{name: value})) as response:
        assert response.status == 400
        assert f"{name} is " in (await response.json())["error"]["message"]


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_defaults_are_accepted(client: aiohttp.ClientSession, path: str) -> None:
    schema, body, _ = ENDPOINTS[path]
    defaults = {
        name: limits["default"] for name, limits in schema["properties"].items() if "default" in limits
    }
    async with client.post(path, json=body(**defaults)) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize("path", ENDPOINTS)
def test_what_is_refused_by_name_is_not_offered(path: str) -> None:
    schema, _, refused = ENDPOINTS[path]
    assert not refused.keys() & schema["properties"].keys()


def test_what_a_body_leaves_out_is_sampled_as_the_schema_says() -> None:
    told = {parameter.name: parameter.default for parameter in SAMPLING if parameter.name != "seed"}  # drawn
    assert told == {name: getattr(SamplingParams(1), name) for name in told}
