"""openai-python's Responses and anthropic against the default model; calls that a grammar forces it to write."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from client_environment import client_python, printed_by
from live_server import Command, serving

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),  # the first time, environments are built
]

MODEL = "smollm2-135m"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Command]:
    log = tmp_path_factory.mktemp("api_clients") / "log"
    async with serving(log, "--tool-parser", "hermes", "--reasoning-parser", "none") as server:
        yield server


@pytest.fixture(scope="module")
def openai_python() -> Path:
    return client_python("openai", ["openai==3.57.0"])


@pytest.fixture(scope="module")
def anthropic_python() -> Path:
    return client_python("anthropic", ["anthropic==2.14.0"])


async def called(python: Path, script: str, call: str, server: Command) -> dict[str, Any]:
    return json.loads(await printed_by(python, Path(__file__).with_name(script), call, server.url, MODEL))


async def test_responses(openai_python: Path, server: Command) -> None:
    answer = await called(openai_python, "openai_tool_calls.py", "response_text", server)
    assert answer["whole"] == answer["streamed"] and "Paris" in answer["whole"]
    assert answer["status"] == "completed"


async def test_responses_that_are_kept_are_refused(openai_python: Path, server: Command) -> None:
    told = await called(openai_python, "openai_tool_calls.py", "response_errors", server)
    assert told["stored"]["param"] == "previous_response_id" and "in input" in told["stored"]["text"]
    assert told["background"]["param"] == "background"


async def test_a_required_call_has_arguments_of_its_schema(openai_python: Path, server: Command) -> None:
    choice = await called(openai_python, "openai_tool_calls.py", "forced_chat", server)
    assert choice["content"] is None and choice["finish"] == "tool_calls"
    name, arguments = choice["calls"][0]
    assert name == "get_weather" and list(json.loads(arguments)) == ["city"]


async def test_messages(anthropic_python: Path, server: Command) -> None:
    answer = await called(anthropic_python, "anthropic_calls.py", "text", server)
    assert answer["whole"] == answer["streamed"]
    assert "".join(answer["pieces"]) == answer["whole"][0]["text"]
    assert answer["stop_reasons"][0] == answer["stop_reasons"][1]
    assert answer["prompts"] == [answer["counted"]] * 2 and answer["counted"] > 10
    assert answer["output_tokens"][0] == answer["output_tokens"][1] <= 12


async def test_errors_of_messages(anthropic_python: Path, server: Command) -> None:
    told = await called(anthropic_python, "anthropic_calls.py", "errors", server)
    assert told["unknown_model"]["class"] == "NotFoundError" and MODEL in told["unknown_model"]["text"]
    assert told["no_room"]["class"] == "BadRequestError" and "max_tokens" in told["no_room"]["text"]
