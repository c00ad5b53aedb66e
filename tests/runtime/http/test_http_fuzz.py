"""Whatever is posted to a route, the answer is one that it documents, in the envelope if it is an error."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
from fuzz_inputs import JSON, bodies, raw_bodies
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynrt.runtime.errors import InvalidRequestError
from dynrt.runtime.http.body import decode_object
from dynrt.runtime.http.operations import OPERATIONS
from dynrt.runtime.http.parameters.unsupported import CHAT, COMPLETIONS

POSTED = {path: operation for (method, path), operation in OPERATIONS.items() if method == "POST"}
ENVELOPES = ({"error"}, {"type", "error", "request_id"})  # OpenAI's, Anthropic's
TYPES = st.sampled_from(["application/json"] * 6 + ["text/plain", "application/x+json", "", "é"])

fuzzing = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def names_of(path: str) -> set[str]:
    """The fields that a route reads or refuses by name."""
    return {*(POSTED[path].body or {}).get("properties", ()), *CHAT, *COMPLETIONS, "stream", "stream_options"}


async def is_documented(response: aiohttp.ClientResponse, path: str) -> None:
    answer = await response.read()
    if response.status == 200:
        if response.content_type == "text/event-stream":
            assert answer.endswith(b"\n\n")
        else:
            json.loads(answer)
        return
    assert response.status in {*POSTED[path].errors, 401, 431}, answer
    error = json.loads(answer)
    assert set(error) in ENVELOPES and error["error"]["message"] and error["error"]["type"]


@settings(fuzzing, max_examples=200)
@given(st.data())
async def test_no_json_body_is_a_server_error(client: aiohttp.ClientSession, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(POSTED)))
    body: Any = data.draw(bodies(names_of(path)) | JSON)
    async with client.post(path, json=body) as response:
        await is_documented(response, path)


@settings(fuzzing, max_examples=100)
@given(st.data())
async def test_no_bytes_are_a_server_error(client: aiohttp.ClientSession, data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(sorted(POSTED)))
    raw, media_type = data.draw(raw_bodies(names_of(path))), data.draw(TYPES)
    async with client.post(path, data=raw, headers={"Content-Type": media_type}) as response:
        await is_documented(response, path)


@given(st.binary(max_size=64))
def test_bytes_are_an_object_or_refused(raw: bytes) -> None:
    try:
        assert isinstance(decode_object(raw), dict)
    except InvalidRequestError as error:
        assert error.message
