"""`dynrt serve` as a command: its one line, its signals, its refusals, and that it leaves no process behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from pathlib import Path

import aiohttp
import pytest
from live_server import (
    Command,
    client_of,
    command,
    complete,
    completion,
    eventually,
    prompt,
    serving,
    texts_of,
)
from process_tree import descendants, is_alive

pytestmark = [pytest.mark.e2e]

REFUSAL_S = 20.0  # nothing is loaded; Python starts on a busy machine
QUICK_S = 5.0  # engines that do not end by themselves within 3 s are killed


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


async def ends(server: Command, status: int, timeout_s: float) -> None:
    """With `status`, and with it everything it started."""
    family = descendants(server.pid)
    assert await server.status(timeout_s) == status, server.log
    await eventually(lambda: not any(map(is_alive, family)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fleet", "plan"),
    [
        (("--prefill", 2, "--decode", 2, "--local-prefill", "never"), "remote"),
        (("--prefill", 1, "--decode", 1, "--local-prefill", "always"), "local"),
        (("--prefill", 0, "--decode", 1, "--local-prefill", "auto"), "local"),
    ],
)
async def test_every_fleet_serves(
    fleet: tuple[object, ...], plan: str, tiny_model_dir: Path, log: Path
) -> None:
    async with command(log, "serve", tiny_model_dir, "--port", 0, *fleet) as server:
        line = await server.line()
        [url] = re.fullmatch(r"dynrt serves llama at (http://127\.0\.0\.1:\d+)\n", line).groups()
        async with client_of(url) as session:
            texts = await asyncio.gather(*(complete(session, prompt(50, seed), 8) for seed in range(6)))
            assert all(texts)
            async with session.get("/metrics") as response:
                plans = dict(re.findall(r'dynrt_plans_total\{kind="(\w+)"\} (\S+)', await response.text()))
        assert plans == {"remote": "0.0", "local": "0.0"} | {plan: "7.0"}  # the start's own request is one
        server.signal(signal.SIGINT)
        await ends(server, 0, QUICK_S)
        assert await server.line() == "", "one line is all it prints"


@pytest.mark.slow
async def test_sigint_lets_running_streams_finish(tiny_model_dir: Path, log: Path) -> None:
    async with serving(log, tiny_model_dir, "--prefill", 0) as server, client_of(server.url) as session:
        expected = await complete(session, prompt(30), 600)
        async with session.post("/v1/completions", json=completion(prompt(30), 600, stream=True)) as response:
            texts = texts_of(response)
            text = await anext(texts)
            server.signal(signal.SIGINT)
            await server.logged("draining")
            text += "".join([piece async for piece in texts])
        assert text == expected
        await ends(server, 0, QUICK_S)


@pytest.mark.slow
async def test_sigterm_is_announced_before_requests_are_refused(tiny_model_dir: Path, log: Path) -> None:
    async with serving(log, tiny_model_dir, "--prefill", 0) as server, client_of(server.url) as session:
        server.signal(signal.SIGTERM)
        await server.logged("requests are still taken")
        async with session.get("/ready") as ready:
            assert ready.status == 503 and ready.headers["Connection"] == "close"
        assert await complete(session, prompt(30), 5)
        assert "draining" not in server.log
        await server.logged("draining")
        await ends(server, 0, QUICK_S)


@pytest.mark.slow
async def test_a_second_signal_ends_it_at_once(tiny_model_dir: Path, log: Path) -> None:
    body = completion(prompt(30), 1900, stream=True)
    async with (
        serving(log, tiny_model_dir, "--prefill", 0) as server,
        client_of(server.url) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        await anext(texts_of(response))
        server.signal(signal.SIGTERM)
        await server.logged("requests are still taken")
        server.signal(signal.SIGTERM)
        await ends(server, 0, QUICK_S)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_during_the_start_ends_it(
    number: signal.Signals, tiny_model_dir: Path, log: Path
) -> None:
    async with command(log, "serve", tiny_model_dir, "--port", 0) as server:
        await server.logged("engine started worker=decode-0")
        server.signal(number)
        await ends(server, 0, QUICK_S)
        assert await server.line() == ""


@pytest.mark.slow
async def test_keys_over_a_unix_socket(tiny_model_dir: Path, tmp_path: Path, log: Path) -> None:
    path, keys = tmp_path / "dynrt.sock", tmp_path / "keys"
    keys.write_text("old\n")
    flags = ("--engine", "sim", "--prefill", 0, "--uds", path, "--api-key-file", keys)
    async with (
        serving(log, tiny_model_dir, *flags, environment={"DYNRT_API_KEYS": "beside"}) as server,
        aiohttp.ClientSession("http://localhost", connector=aiohttp.UnixConnector(str(path))) as session,
    ):

        async def status(key: str) -> int:
            async with session.get("/v1/models", headers={"x-api-key": key}) as response:
                return response.status

        assert [await status(key) for key in ("old", "beside", "new", "")] == [200, 200, 401, 401]
        keys.write_text("new\n")
        server.signal(signal.SIGHUP)

        async def is_new() -> bool:
            return await status("new") == 200

        await eventually(is_new)
        assert await status("old") == 401
        server.signal(signal.SIGINT)
        await ends(server, 0, QUICK_S)
    assert not path.exists()


async def refused(log: Path, *arguments: object) -> str:
    """What `dynrt serve ARGUMENTS` says in its one line on standard error as it exits with status 2."""
    async with command(log, "serve", *arguments) as server:
        assert await server.status(REFUSAL_S) == 2
        assert await server.line() == ""
    assert "engine started" not in server.log, "refused before anything is loaded"
    [message] = [line for line in server.log.splitlines() if line.startswith("dynrt: ")]
    return message


async def test_a_port_in_use(tiny_model_dir: Path, log: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = await refused(log, tiny_model_dir, "--port", port)
    assert message == (
        f"dynrt: cannot listen on 127.0.0.1:{port}: the port is in use; choose another with --port (0: any free one)"
    )


async def test_a_model_that_is_nowhere(log: Path) -> None:
    message = await refused(log, "/nowhere/at-all", "--port", 0)
    assert "'/nowhere/at-all'" in message and "'smollm2-135m'" in message


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
async def test_a_directory_that_cannot_be_read(tmp_path: Path, log: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0)
    message = await refused(log, tmp_path / "closed", "--port", 0)
    assert f"'{tmp_path}/closed' cannot be read (Permission denied)" in message


async def test_a_name_that_cannot_be_a_path(log: Path) -> None:
    message = await refused(log, "m" * 5000, "--port", 0)
    assert "cannot be read (File name too long)" in message


async def test_a_directory_that_is_no_model(tmp_path: Path, log: Path) -> None:
    message = await refused(log, tmp_path, "--port", 0)
    assert f"{tmp_path} has no config.json, tokenizer.json, *.safetensors" in message and ".gguf" in message


async def test_a_file_that_is_no_gguf(tmp_path: Path, log: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"not a model at all" * 10)
    message = await refused(log, tmp_path / "weights.gguf", "--port", 0)
    assert f"{tmp_path}/weights.gguf" in message and "GGUF" in message


@pytest.mark.parametrize(
    ("flag", "value", "way_out"),
    [
        ("--port", 70000, "0 (any free port) to 65535"),
        ("--prefill", 65, "0 to 64"),
        ("--decode", 0, "--decode 1 or more"),
        ("--kv-blocks", 1, "at least 2"),
    ],
)
async def test_numbers_out_of_range(flag: str, value: int, way_out: str, log: Path) -> None:
    message = await refused(log, flag, value)
    assert f"{flag} " in message and str(value) in message and way_out in message
