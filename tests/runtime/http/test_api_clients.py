"""Clients that nobody here wrote, with a scripted model that reasons and calls tools, or a server that fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from client_environment import client_node, client_python, printed_by
from scripted_backend import MODEL
from tool_backend import ARGUMENTS, ToolBackend

from dynrt.runtime.errors import EngineError, OverloadedError
from dynrt.runtime.http.options import EndpointOptions
from dynrt.runtime.http.transport.server import HttpServer
from dynrt.runtime.requests import GenerateOutput

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(400),  # the first time, environments are built
]

CALLS = Path(__file__).parents[2] / "e2e"
needs_node = pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")


@pytest.fixture
async def backend() -> ToolBackend:
    backend = ToolBackend()
    backend.cards[0] = backend.cards[0].__class__(MODEL, created=7, context_length=4096, vocab_size=1000)
    return backend


@pytest.fixture(scope="module")
def openai_python() -> Path:
    return client_python("openai", ["openai==3.57.0"])


@pytest.fixture(scope="module")
def anthropic_python() -> Path:
    return client_python("anthropic", ["anthropic==2.14.0"])


@pytest.fixture(scope="module")
def langchain() -> Path:
    return client_python("langchain-openai", ["langchain-openai==1.7.4"])


@pytest.fixture(scope="module")
def openai_node() -> Path:
    return client_node("openai-node", ["openai@6.49.0"])


async def called(python: Path, script: str, call: str, server: HttpServer) -> dict[str, Any]:
    return json.loads(await printed_by(python, CALLS / script, call, server.url, MODEL))


async def test_openai_chats_with_tools(openai_python: Path, server: HttpServer, backend: ToolBackend) -> None:
    answer = await called(openai_python, "openai_tool_calls.py", "chat", server)
    assert (
        answer["whole"]
        == answer["streamed"]
        == {
            "content": "Let me see.",
            "reasoning": "Hm.",
            "calls": [["get_weather", ARGUMENTS]],
            "finish": "tool_calls",
        }
    )
    assert "tool_calls.function.arguments.done" in answer["events"]
    question, turn, result = backend.chats[-1][0]
    assert (question["role"], turn["role"], result["role"]) == ("user", "assistant", "tool")
    assert turn["tool_calls"][0]["id"] == result["tool_call_id"] and result["content"] == "18 °C"


async def test_openai_responses(openai_python: Path, server: HttpServer, backend: ToolBackend) -> None:
    answer = await called(openai_python, "openai_tool_calls.py", "response", server)
    assert answer["whole"] == answer["streamed"] == ["reasoning", "message", "function_call"]
    assert answer["texts"] == ["Let me see."] * 2 and answer["calls"] == [["get_weather", ARGUMENTS]] * 2
    assert answer["statuses"] == ["completed"] * 3 and answer["usage"][0] == answer["usage"][1]
    assert answer["events"][:2] == ["response.created", "response.in_progress"]
    assert answer["events"][-1] == "response.completed"
    assert [message["role"] for message in backend.chats[-1][0]] == ["system", "user", "assistant", "tool"]


async def test_anthropic_messages_with_tools(
    anthropic_python: Path, server: HttpServer, backend: ToolBackend
) -> None:
    answer = await called(anthropic_python, "anthropic_calls.py", "tools", server)
    thinking, text, call = answer["content"]
    assert (thinking["thinking"], text["text"]) == ("Hm.", "Let me see.")
    assert (call["name"], call["input"]) == ("get_weather", json.loads(ARGUMENTS))
    assert answer["stop_reason"] == answer["after"] == "tool_use"
    assert {"thinking", "text", "input_json", "message_stop"} <= set(answer["events"])
    question, turn, result = backend.chats[-1][0]
    assert (question["role"], turn["role"], result["role"]) == ("user", "assistant", "tool")
    assert turn["tool_calls"][0]["id"] == result["tool_call_id"]


async def test_a_stream_that_breaks_raises(
    openai_python: Path, anthropic_python: Path, server: HttpServer, backend: ToolBackend
) -> None:
    backend.script = [GenerateOutput([1], "No"), EngineError("out of luck")]
    told = await called(openai_python, "openai_tool_calls.py", "broken_stream", server)
    assert told["deltas"] == ["No"] and "out of luck" in told["text"]
    told = await called(anthropic_python, "anthropic_calls.py", "broken_stream", server)
    assert told["pieces"] == ["No"] and "out of luck" in told["text"]


async def test_langchain_binds_tools(langchain: Path, server: HttpServer, backend: ToolBackend) -> None:
    answer = await called(langchain, "langchain_calls.py", "tools", server)
    assert answer["calls"] == [[["get_weather", json.loads(ARGUMENTS)]]] * 2 and answer["invalid"] == []
    assert answer["texts"] == ["Let me see."] * 2 and answer["after"] == "Let me see."
    question, turn, result = backend.chats[-1][0]
    assert (question["role"], turn["role"], result["role"]) == ("user", "assistant", "tool")
    assert turn["tool_calls"][0]["id"] == result["tool_call_id"] and result["content"] == "18 °C in Zürich 🦜"


# --- openai-node, which shows "503 status code (no body)" for what is not in the one envelope ---------


async def by_node(openai_node: Path, call: str, server: HttpServer) -> dict[str, Any]:
    command = ("env", f"NODE_PATH={openai_node}", "node", CALLS / "openai_calls.cjs")
    return json.loads(await printed_by(*command, call, server.url, MODEL))


@needs_node
async def test_node_without_a_key(openai_node: Path, serve: Any) -> None:
    server = await serve(EndpointOptions(api_keys=("another",)))
    told = (await by_node(openai_node, "refusal", server))["refused"]
    assert (told["class"], told["status"], told["type"]) == (
        "AuthenticationError",
        401,
        "authentication_error",
    )
    assert "API key" in told["message"]


@needs_node
async def test_node_while_there_is_no_room(
    openai_node: Path, server: HttpServer, backend: ToolBackend
) -> None:
    backend.script = [OverloadedError("all are busy", retry_after_s=7)]
    told = (await by_node(openai_node, "refusal", server))["refused"]
    assert (told["status"], told["type"], told["wait"]) == (503, "overloaded_error", "7")
    assert told["message"] == "503 all are busy"


@needs_node
async def test_node_meets_a_bug(openai_node: Path, server: HttpServer, backend: ToolBackend) -> None:
    backend.script = [ZeroDivisionError("secret")]
    told = (await by_node(openai_node, "refusal", server))["refused"]
    assert (told["status"], told["type"]) == (500, "server_error")
    assert "(no body)" not in told["message"] and "secret" not in told["message"]


@needs_node
async def test_node_reads_a_stream_that_breaks(
    openai_node: Path, server: HttpServer, backend: ToolBackend
) -> None:
    backend.script = [GenerateOutput([1], "No"), EngineError("out of luck")]
    told = await by_node(openai_node, "brokenStream", server)
    assert "".join(told["pieces"]) == "No" and "out of luck" in told["broken"]["message"]
