"""The servers that `bench/frontend.py` sets side by side, each as its users would start it, on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from dynrt.runtime.spawner import dynrt_command

READY_S = 180.0
STOP_S = 20.0
RIG = Path(__file__).resolve().parent
NUM_ENGINES = 2
AT_ONCE = 1e6  # the speedup at which a mocker takes no time; what it calls infinite, 0, is none
STEP_S = 0.006  # of Dynamo's mocker, and so of the other engines


class Server(msgspec.Struct, frozen=True):
    """A running server. `pids`: its front process, and its engines."""

    name: str
    port: int
    model: str
    pids: dict[str, list[int]]


@contextmanager
def dynrt(model: Path, folder: Path, step_s: float) -> Iterator[Server]:
    """One front process, with metrics, validation and cancellation as always, and engines that only make tokens."""
    port = free_port()
    address = f"ipc://{folder}/control-{port}"
    fleet = ["--prefill", "0", "--decode", "0", "--control", address]
    serve = [*dynrt_command(), "serve", str(model), "--port", str(port), *fleet]
    engine = [sys.executable, str(RIG / "token_engine.py"), address, str(model), str(step_s)]
    with ExitStack() as stack:
        front = stack.enter_context(_running("dynrt", serve, folder))
        engines = [
            stack.enter_context(_running(f"dynrt-engine-{number}", engine, folder)).pid
            for number in range(NUM_ENGINES)
        ]
        _wait_ready(port, model.name)
        yield Server("dynrt", port, model.name, {"front": [front.pid], "engines": engines})


@contextmanager
def dynamo(python: Path, model: Path, folder: Path, step_s: float) -> Iterator[Server]:
    """Its frontend with KV routing, and mockers; everything else is as it comes, but kept on loopback."""
    port, name = free_port(), model.name
    speedup = STEP_S / step_s if step_s else AT_ONCE
    address = "127.0.0.1"
    environment = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(folder / "dynamo-kv"),
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "zmq",
        "DYN_TCP_RPC_HOST": address,
        "DYN_TCP_RESPONSE_STREAM_HOST": address,
        "DYN_EVENT_PLANE_HOST": address,
        "DYN_HTTP_RPC_HOST": address,
        "DYN_LOG": "warn",
        "DYN_RUNTIME_NUM_WORKER_THREADS": "2",
        "HF_HUB_OFFLINE": "1",
    }
    front = [str(python), "-m", "dynamo.frontend", "--http-host", address, "--http-port", str(port)]
    mocker = [str(python), "-m", "dynamo.mocker", "--model-path", str(model), "--model-name", name]
    size = [
        "--num-gpu-blocks-override",
        "65536",
        "--max-num-seqs",
        "1024",
        "--max-num-batched-tokens",
        "65536",
    ]
    with ExitStack() as stack:

        def start(label: str, command: list[str]) -> int:
            return stack.enter_context(_running(label, command, folder, environment)).pid

        front_pid = start("dynamo-front", [*front, "--router-mode", "kv"])
        mockers = [
            start(
                f"dynamo-mocker-{number}",
                [*mocker, "--speedup-ratio", str(speedup), "--block-size", "16", *size],
            )
            for number in range(NUM_ENGINES)
        ]
        _wait_ready(port, name)
        yield Server("dynamo", port, name, {"front": [front_pid], "engines": mockers})


@contextmanager
def vllm_router(python: Path, folder: Path) -> Iterator[Server]:
    """Forwards to stand-ins for engines that have made the events."""
    port, ports = free_port(), [free_port() for _ in range(NUM_ENGINES)]
    with ExitStack() as stack:
        engines = [
            stack.enter_context(
                _running(
                    f"engine-{own}",
                    [sys.executable, str(RIG / "sse_engine.py"), str(own), str(STEP_S)],
                    folder,
                )
            ).pid
            for own in ports
        ]
        urls = [f"http://127.0.0.1:{own}" for own in ports]
        command = [str(python), "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        options = [
            "--prometheus-host",
            "127.0.0.1",
            "--prometheus-port",
            str(free_port()),
            "--log-level",
            "warning",
        ]
        routing = ["--policy", "round_robin", "--worker-urls", *urls]
        front = stack.enter_context(_running("vllm-router", [*command, *options, *routing], folder))
        _wait_ready(port, "m")
        yield Server("vllm-router", port, "m", {"front": [front.pid], "engines": engines})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def _running(
    label: str, command: list[str], folder: Path, environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Its output goes to a file in `folder`; ended by SIGTERM, and if need be by SIGKILL."""
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "TOKIO_WORKER_THREADS": "2", **(environment or {})}
    with (folder / f"{label}.log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=settings
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT if label == "dynrt" else signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_ready(port: int, model: str) -> None:
    """Until a first request has been answered. Raises TimeoutError."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 2,
        "stream": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        msgspec.json.encode(body),
        {"Content-Type": "application/json"},
    )
    deadline = time.monotonic() + READY_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=5) as answer:
                answer.read()
                return
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(f"the server at port {port} is not ready: {error}") from error
            time.sleep(0.1)
