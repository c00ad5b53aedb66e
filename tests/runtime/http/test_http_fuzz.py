"""Whatever JSON is posted, the answer is a 200 or a 4xx in the envelope; whatever bytes, a 400."""

from __future__ import annotations

import json
from typing import Any

from aiohttp.test_utils import TestClient, TestServer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_backend import ScriptedBackend

from dynrt.runtime.errors import InvalidRequestError
from dynrt.runtime.http.app import create_app
from dynrt.runtime.http.body import decode_object
from dynrt.runtime.http.unsupported import CHAT, COMPLETIONS

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
READ = [
    "model", "messages", "prompt", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "seed",
    "temperature", "top_p", "top_k", "stop", "stop_token_ids", "min_tokens", "ignore_eos", "cache_salt", "dynrt",
    "include_stop_str_in_output", "add_generation_prompt", "chat_template_kwargs", "add_special_tokens",
]  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": JSON | st.sampled_from(["system", "user", "assistant", "developer", "tool"]),
        "content": JSON
        | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": JSON}), max_size=2),
        "tool_calls": JSON,
    },
)
BODY = st.fixed_dictionaries(
    {
        "messages": JSON | st.lists(MESSAGE, max_size=3),
        "prompt": JSON | st.text() | st.lists(st.integers(0, 1100)),
    },
    optional=dict.fromkeys({*READ, *CHAT, *COMPLETIONS} - {"messages", "prompt"}, JSON),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(["/v1/chat/completions", "/v1/completions"]), body=BODY | JSON)
async def test_no_json_body_is_a_server_error(path: str, body: Any) -> None:
    async with TestClient(TestServer(create_app(ScriptedBackend()))) as client:
        response = await client.post(
            path, data=json.dumps(body), headers={"Content-Type": "application/json"}
        )
        assert response.status in (200, 400, 404)
        answer = await response.read()
        if response.status != 200:
            assert json.loads(answer)["error"]["message"]


@given(st.binary(max_size=64))
def test_bytes_are_an_object_or_refused(raw: bytes) -> None:
    try:
        assert isinstance(decode_object(raw), dict)
    except InvalidRequestError as error:
        assert error.message
