"""The command line: light where it only talks, and clear about what cannot work."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dynrt.runtime import cli

HEAVY = ("torch", "aiohttp", "zmq", "msgspec", "tokenizers", "nixl", "asyncio", "prometheus_client")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dynrt.runtime.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom dynrt.runtime.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit as end: assert end.code == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("usage: dynrt")
    assert shown.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["serve", "engine"])
def test_each_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    assert "--kv-blocks" in capsys.readouterr().out


def test_help_of_engine_hides_what_is_for_the_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["engine", "--help"])
    shown = capsys.readouterr().out
    assert "--join" in shown
    assert "--lifeline" not in shown


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("dynrt 0.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "99999"], "--port is 99999; it can be 0 (any free port) to 65535"),
        (["serve", "--port", "-1"], "--port is -1"),
        (["serve", "--frontends", "0"], "--frontends is 0; it can be 1 to 64"),
        (["serve", "--frontends", "2", "--uds", "/tmp/x"], "--frontends shares a TCP port"),
        (["serve", "--prefill", "1", "--decode", "0"], "--prefill 1 --decode 0 leaves nobody to decode"),
        (["serve", "--prefill", "0", "--decode", "0"], "leaves no engine"),
        (["serve", "--prefill", "-1"], "--prefill is -1; it can be 0 to 64"),
        (["serve", "--threads", "0"], "--threads is 0; at least 1"),
        (["serve", "--kv-blocks", "1"], "--kv-blocks is 1; at least 2"),
        (["serve", "--host", "0.0.0.0", "--port", "0"], "or say --allow-unauthenticated"),
        (["serve", "--api-key-file", "/no/keys"], "cannot read the API keys in /no/keys"),
        (["serve", "--frontends", "2", "--api-key-file", "/no/keys"], "cannot read the API keys in /no/keys"),
        (["serve", "--tls-cert", "/no/cert"], "needs both --tls-cert and --tls-key"),
        (["serve", "--uds", "/no/folder/sock"], "cannot listen at /no/folder/sock"),
        (["serve", "--uds-mode", "abc"], "argument --uds-mode"),
        (["serve", "--prefill", "many"], "invalid int value: 'many'"),
        (["serve", "--local-prefill", "sometimes"], "invalid choice: 'sometimes'"),
        (["engine"], "--join"),
        ([], "COMMAND"),
        (["serve", "/no/such/model", "--port", "0"], "model '/no/such/model' is nowhere to be found"),
        (["serve", "--control", "nonsense", "--port", "0"], "cannot listen for engines at 'nonsense'"),
    ],
)
def test_what_cannot_work_is_told_with_status_2(
    arguments: list[str], message: str, tiny_model_dir: Path
) -> None:
    if "--control" in arguments:
        arguments = [arguments[0], str(tiny_model_dir), *arguments[1:]]
    ended = run(*arguments)
    assert ended.returncode == 2, ended.stderr
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_port_in_use_is_told_before_anything_is_loaded(tiny_model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = run("serve", str(tiny_model_dir), "--port", str(port))
    assert ended.returncode == 2, ended.stderr
    assert f"{port}" in ended.stderr
    assert "engine started" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_engine_with_a_wrong_address(tiny_model_dir: Path) -> None:
    ended = run(
        "engine", str(tiny_model_dir), "--join", "nonsense", "--dtype", "float32", "--kv-blocks", "16"
    )
    assert ended.returncode == 2, ended.stderr
    assert "--join 'nonsense' is no address" in ended.stderr
    assert "Traceback" not in ended.stderr
