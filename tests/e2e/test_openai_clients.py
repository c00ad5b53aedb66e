"""Clients of OpenAI's API that nobody here wrote, in environments of their own, against prefill and decode apart.

openai-node, langchain-openai, litellm, the llm command and llama-benchy; `test_clients` has openai-python,
`test_api_clients_live` anthropic, `test_lm_eval` lm-eval, and `tests/runtime/http/test_api_clients.py` what takes a
model that calls tools, or a server that fails.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer
from client_environment import client_node, client_python, printed_by
from live_server import Command, client_of, eventually, holds_nothing, metrics_of, serving

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),  # the first time, environments are built
]

MODEL = "smollm2-135m"
FOLDER = Path(__file__).parent
QUESTION = "What is the capital of France?"
CANCELLED = 'dynrt_requests_total{outcome="cancelled"}'
needs_node = pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Command]:
    log = tmp_path_factory.mktemp("openai_clients") / "log"
    async with serving(log, "--local-prefill", "never") as server:
        yield server


async def by_python(python: Path, script: str, *arguments: str, settings: tuple[str, ...] = ()) -> Any:
    return json.loads(await printed_by("env", *settings, python, FOLDER / script, *arguments))


# --- openai-node ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def openai_node() -> Path:
    return client_node("openai-node", ["openai@6.49.0"])


async def by_node(openai_node: Path, call: str, server: Command) -> Any:
    command = ("env", f"NODE_PATH={openai_node}", "node", FOLDER / "openai_calls.cjs")
    return json.loads(await printed_by(*command, call, server.url, MODEL))


@needs_node
async def test_node_models(openai_node: Path, server: Command) -> None:
    assert await by_node(openai_node, "models", server) == {"listed": [MODEL], "retrieved": MODEL}


@needs_node
async def test_node_chat(openai_node: Path, server: Command) -> None:
    answer = await by_node(openai_node, "chat", server)
    assert "Paris" in answer["contents"][0] and len(set(answer["contents"])) == 1
    assert answer["finish"] == ["stop", "stop"] and answer["usage"][0] == answer["usage"][1]
    assert answer["events"] == ["chunk", "connect", "content", "end", "finalChatCompletion", "message"]


@needs_node
async def test_node_choices(openai_node: Path, server: Command) -> None:
    answer = await by_node(openai_node, "choices", server)
    assert answer["streamed"] == answer["whole"] and len(set(answer["whole"])) > 2
    assert answer["finished"] == [0, 1, 2, 3]


@needs_node
async def test_node_logprobs(openai_node: Path, server: Command) -> None:
    answer = await by_node(openai_node, "logprobs", server)
    assert answer["spelled"] == [answer["text"]] * 2 and set(answer["tops"]) == {2}


@needs_node
async def test_node_responses(openai_node: Path, server: Command) -> None:
    answer = await by_node(openai_node, "response", server)
    assert "Paris" in answer["texts"][0] and answer["texts"][0] == answer["texts"][1]
    assert answer["statuses"] == ["completed", "completed"]


@needs_node
async def test_node_shows_why_it_was_refused(openai_node: Path, server: Command) -> None:
    """From an error that is not in the one envelope, openai-node makes `400 status code (no body)`."""
    told = await by_node(openai_node, "errors", server)
    assert not [name for name, error in told.items() if error is None or "(no body)" in error["message"]]
    statuses = {name: error["status"] for name, error in told.items()}
    assert statuses == {
        "no_room": 400, "no_room_to_stream": 400, "several": 400, "unknown_model": 404, "unknown_route": 404,
        "method": 405, "too_large": 413, "content_type": 415, "not_built": 501,
    }  # fmt: skip
    for name in ("no_room", "no_room_to_stream"):
        assert (told[name]["code"], told[name]["param"]) == ("context_length_exceeded", "max_tokens")
    assert told["unknown_model"]["code"] == "model_not_found" and MODEL in told["unknown_model"]["message"]
    assert told["several"]["param"] == "messages" and "temperature is 9" in told["several"]["message"]
    assert "use POST" in told["method"]["message"] and "16777216" in told["too_large"]["message"]


@needs_node
async def test_node_that_leaves_frees_everything(openai_node: Path, server: Command) -> None:
    async with client_of(server.url) as session:
        before = await metrics_of(session)
        assert "first" in await by_node(openai_node, "leave", server)

        async def is_freed() -> bool:
            metrics = await metrics_of(session)
            return metrics[CANCELLED] == before[CANCELLED] + 1 and holds_nothing(metrics)

        await eventually(is_freed)


# --- langchain-openai -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def langchain() -> Path:
    return client_python("langchain-openai", ["langchain-openai==1.7.4"])


async def test_langchain_chat(langchain: Path, server: Command) -> None:
    answer = await by_python(langchain, "langchain_calls.py", "chat", server.url, MODEL)
    assert "Paris" in answer["texts"][0] and len(set(answer["texts"])) == 1
    assert answer["usage"][0] == answer["usage"][1] != [] and answer["finish"] == ["stop", "stop"]


async def test_langchain_batch(langchain: Path, server: Command) -> None:
    first, second = await by_python(langchain, "langchain_calls.py", "batch", server.url, MODEL)
    assert "Paris" in first and "4" in second


async def test_langchain_structured_output(langchain: Path, server: Command) -> None:
    answers = await by_python(langchain, "langchain_calls.py", "structured", server.url, MODEL)
    assert [set(answer) for answer in answers] == [{"city", "in_europe"}] * 2


async def test_langchain_errors(langchain: Path, server: Command) -> None:
    told = await by_python(langchain, "langchain_calls.py", "errors", server.url, MODEL)
    assert told["prompt_too_long"]["overflow"] and "8192" in told["prompt_too_long"]["text"]
    assert not told["unknown_model"]["overflow"] and MODEL in told["unknown_model"]["text"]


# --- litellm ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def litellm() -> Path:
    return client_python("litellm", ["litellm==1.110.2"])


async def test_litellm(litellm: Path, server: Command) -> None:
    models = (f"hosted_vllm/{MODEL}", f"openai/{MODEL}")
    offline = ("LITELLM_LOCAL_MODEL_COST_MAP=True",)
    answers = await by_python(litellm, "litellm_calls.py", server.url, *models, settings=offline)
    assert [*answers] == [*models]
    for answer in answers.values():
        check_litellm_chat(**answer["chat"])
        assert answer["choices"]["spelled"] == answer["choices"]["texts"]
        assert len(set(answer["choices"]["texts"])) == 2
        check_litellm_errors(answer["errors"])


def check_litellm_chat(texts: list[str], finish: list[str], usage: list[int]) -> None:
    assert "Paris" in texts[0] and texts[0] == texts[1]
    assert finish == ["stop", "stop"] and usage[0] == usage[1]


def check_litellm_errors(told: dict[str, dict[str, str]]) -> None:
    """It maps by status and text, and its proxy looks for a larger model only if it knows the text."""
    assert {name: error["class"] for name, error in told.items()} == {
        "prompt_too_long": "ContextWindowExceededError",
        "no_room": "ContextWindowExceededError",
        "no_room_to_stream": "ContextWindowExceededError",
        "unknown_model": "NotFoundError",
        "bad_value": "BadRequestError",
    }
    assert (
        "at most 8191" in told["prompt_too_long"]["text"] and "temperature is -3" in told["bad_value"]["text"]
    )


# --- llm --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> Path:
    return client_python("llm", ["llm==0.36"]).with_name("llm")


async def test_llm_command(llm: Path, server: Command, tmp_path: Path) -> None:
    entry = f"- model_id: dynrt\n  model_name: {MODEL}\n  api_base: {server.url}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(entry)
    command = ("env", f"LLM_USER_PATH={tmp_path}", llm, "--no-log", "--key", "unused", "--model", "dynrt")
    options = ("-o", "temperature", 0, "-o", "max_tokens", 24)
    streamed = await printed_by(*command, *options, QUESTION)
    assert "Paris" in streamed and await printed_by(*command, *options, "--no-stream", QUESTION) == streamed

    shown_as_it_fails = ("bash", "-c", '"$@" 2>&1; test $? = 1', "bash")
    told = await printed_by(*shown_as_it_fails, *command, "-o", "max_tokens", 1_000_000, QUESTION)
    assert told.startswith("Error: ") and "max_tokens is 1000000" in told


# --- llama-benchy -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llama_benchy() -> Path:
    return client_python("llama-benchy", ["llama-benchy==0.4.0"]).with_name("llama-benchy")


@pytest_asyncio.fixture(loop_scope="module")
async def book_url() -> AsyncIterator[str]:
    """Where prompts are cut from: our own documentation, for once."""
    text = "\n".join(page.read_text() for page in sorted((FOLDER.parents[1] / "docs").glob("*.md")))

    async def book(request: web.Request) -> web.Response:
        return web.Response(text=text)

    app = web.Application()
    app.router.add_get("/book.txt", book)
    async with TestServer(app) as server:
        yield str(server.make_url("/book.txt"))


async def test_llama_benchy_completes(
    llama_benchy: Path, server: Command, default_model_dir: Path, book_url: str, tmp_path: Path
) -> None:
    results = tmp_path / "results.json"
    await printed_by(
        "env", f"HOME={tmp_path}", "HF_HUB_OFFLINE=1", llama_benchy, "--base-url", f"{server.url}/v1",
        *("--model", MODEL, "--tokenizer", default_model_dir, "--book-url", book_url, "--skip-coherence"),
        *("--pp", 64, "--tg", 8, "--depth", 0, 32, "--concurrency", 1, 2, "--runs", 1, "--exact-tg", "--no-cache"),
        *("--latency-mode", "generation", "--exit-on-first-fail", "--format", "json", "--save-result", results),
    )  # fmt: skip
    benchmarks = json.loads(results.read_text())["benchmarks"]
    assert [(one["context_size"], one["concurrency"]) for one in benchmarks] == [
        (0, 1),
        (0, 2),
        (32, 1),
        (32, 2),
    ]
    assert all(one["tg_throughput"]["mean"] > 0 for one in benchmarks)
