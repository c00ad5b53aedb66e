"""Clients that nobody here wrote, openai-python and curl, against the default model; README's examples as pasted."""

from __future__ import annotations

import json
import re
import shutil
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from client_environment import client_python, printed_by
from live_server import Command, client_of, command, eventually, holds_nothing, metrics_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),  # the first time, environments are built
]

MODEL = "smollm2-135m"
README = Path(__file__).parents[2] / "README.md"
CALLS = Path(__file__).with_name("openai_calls.py")
CANCELLED = 'dynrt_requests_total{outcome="cancelled"}'
CANCEL_LIMIT_S = 30.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Command]:
    """On the port that README's examples name, if it is free."""
    log = tmp_path_factory.mktemp("clients") / "log"
    async with command(log, "serve", "--port", default_port_or_any(), "--dtype", "float32") as server:
        await server.ready()
        yield server


def default_port_or_any() -> int:
    try:
        with socket.create_server(("127.0.0.1", 8000)):
            return 8000
    except OSError:
        return 0


@pytest.fixture(scope="module")
def openai_python() -> Path:
    return client_python("openai", ["openai==3.57.0"])


async def called(openai_python: Path, server: Command, call: str) -> dict[str, Any]:
    return json.loads(await printed_by(openai_python, CALLS, call, server.url, MODEL))


async def test_models(openai_python: Path, server: Command) -> None:
    assert await called(openai_python, server, "models") == {"listed": [MODEL], "retrieved": MODEL}


async def test_chat(openai_python: Path, server: Command) -> None:
    answer = await called(openai_python, server, "chat")
    assert answer["streamed"] == answer["whole"]
    assert "Paris" in answer["whole"]
    assert answer["finish"][0] == answer["finish"][1]
    assert answer["usage"][0] == answer["usage"][1]


async def test_completion(openai_python: Path, server: Command) -> None:
    answer = await called(openai_python, server, "completion")
    assert answer["streamed"] == answer["whole"]
    assert answer["whole"].strip() and "\n" not in answer["whole"]


async def test_choices(openai_python: Path, server: Command) -> None:
    answer = await called(openai_python, server, "choices")
    assert answer["indices"] == [0, 1, 2, 3] and answer["tokens"] == 4 * 6
    assert answer["streamed"] == answer["whole"], "seeds are derived from the one asked for"
    assert answer["alone"] == answer["whole"][2], "a prompt's first choice is what it gets by itself"
    assert len(set(answer["whole"])) > 2


async def test_logprobs(openai_python: Path, server: Command) -> None:
    answer = await called(openai_python, server, "logprobs")
    assert answer["spelled"] == answer["text"] and all(answer["greedy"])
    told, text = answer["of_echo"], answer["echo"]
    assert text.startswith("Paris is the 🦜") and told["token_logprobs"][0] is None
    ends = [*told["text_offset"][1:], len(text)]
    for token, begin, end in zip(told["tokens"], told["text_offset"], ends, strict=True):
        assert token.startswith("bytes:") or text[begin:end] == token
    assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values())


async def test_token_ids_and_text_agree_about_a_stop_string(openai_python: Path, server: Command) -> None:
    answer = await called(openai_python, server, "token_ids")
    assert answer["texts"][0] == answer["texts"][1] and answer["ids"][0] == answer["ids"][1]
    assert answer["stop_reason"] == "gest an"
    assert answer["spelled"].startswith(answer["texts"][0] + "gest an")


async def test_an_answer_of_half_a_character(openai_python: Path, server: Command) -> None:
    answer = await called(openai_python, server, "half_a_character")
    assert answer["parrot"] > 1 and answer["texts"] == ["\ufffd"] * 2
    assert answer["token"][0].startswith("bytes:\\x")


async def test_structured_answers(openai_python: Path, server: Command) -> None:
    answer = await called(openai_python, server, "structured")
    assert answer["finish"] == "stop" and set(answer["parsed"]) == {"city", "in_europe"}


async def test_errors_are_shown(openai_python: Path, server: Command) -> None:
    errors = await called(openai_python, server, "errors")
    too_long, unknown_model = errors["too_long"], errors["unknown_model"]
    assert too_long["class"] == "BadRequestError" and too_long["code"] == "context_length_exceeded"
    assert too_long["param"] == "max_tokens" and "max_tokens is 1000000" in too_long["text"]
    assert unknown_model["class"] == "NotFoundError" and MODEL in unknown_model["text"]


async def test_leaving_in_mid_stream_frees_everything(openai_python: Path, server: Command) -> None:
    async with client_of(server.url) as session:
        before = await metrics_of(session)
        assert (await called(openai_python, server, "leave"))["first"]

        async def is_freed() -> bool:
            metrics = await metrics_of(session)
            return metrics[CANCELLED] == before[CANCELLED] + 1 and holds_nothing(metrics)

        await eventually(is_freed, CANCEL_LIMIT_S)


def readme_block(language: str, mark: str) -> str:
    """The one example in README that has `mark` in it."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    [block] = [block for block in blocks if mark in block]
    return block


async def test_readme_openai_example(openai_python: Path, server: Command, tmp_path: Path) -> None:
    block = readme_block("python", "import OpenAI")
    assert "http://127.0.0.1:8000" in block
    (tmp_path / "example.py").write_text(block.replace("http://127.0.0.1:8000", server.url))
    assert (await printed_by(openai_python, tmp_path / "example.py")).strip()


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
async def test_readme_curl_example(server: Command) -> None:
    block = readme_block("sh", "curl ")
    assert "http://127.0.0.1:8000" in block
    printed = await printed_by("bash", "-c", block.replace("http://127.0.0.1:8000", server.url))
    *events, done = [
        line.removeprefix("data: ") for line in printed.splitlines() if line.startswith("data: ")
    ]
    assert done == "[DONE]"
    pieces = [json.loads(event)["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(pieces).strip()
    await server.logged("outcome=answered")
    assert "client_left" not in server.log.rpartition("path=/v1/chat/completions")[2], (
        "curl read it to its end"
    )


async def test_readme_embedding_example(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(readme_block("python", "import GenerateRequest"))
    assert (await printed_by(sys.executable, tmp_path / "example.py")).strip()
