"""What a `token_engine` needs for a first token when nothing stands before it but a socket and a blocking caller."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import zmq

from dynrt.runtime.messages import (
    FromEngine,
    Register,
    SamplingParams,
    StepReport,
    Submit,
    Welcome,
    decode_from_engine,
    encode,
    pack_ids,
)
from dynrt.transfer.ucx import ucx_environment
from rig.text_work import FRAME
from rig.token_engine import FIRST_WORD, VOCAB

RIG = Path(__file__).resolve().parent
DEADLINE_MS = 60_000
STOP_S = 10.0
HEARTBEAT_INTERVAL_S = 5.0
WARMUP = 20
PROMPT_TOKENS = 40  # about those of a short chat, its template included


class _Engine(NamedTuple):
    socket: zmq.Socket[bytes]
    identity: bytes

    def ask(self, key: bytes, prompt_ids: bytes) -> float:
        """Seconds from sending a prompt to having its token."""
        sent_at = time.perf_counter()
        submit = Submit(key, 0, "generate", prompt_ids, SamplingParams(1, ignore_eos=True), frame=FRAME)
        self.socket.send_multipart([self.identity, encode(submit)])
        while True:
            _, message = _receive(self.socket)
            if isinstance(message, StepReport) and message.deltas:
                assert message.deltas[0].key == key, "an answer to another prompt"
                return time.perf_counter() - sent_at


def first_token_s(model: Path, requests: int) -> list[float]:
    """Of prompts one after the other, from an engine whose steps take no time."""
    draw = random.Random(0)
    prompts = [
        pack_ids([draw.randrange(FIRST_WORD, VOCAB) for _ in range(PROMPT_TOKENS)])
        for _ in range(WARMUP + requests)
    ]
    with _started(model) as engine:
        return [engine.ask(secrets.token_bytes(16), prompt) for prompt in prompts][WARMUP:]


@contextmanager
def _started(model: Path) -> Iterator[_Engine]:
    with tempfile.TemporaryDirectory(prefix="dynrt-bench-") as folder, zmq.Context() as context:
        socket = context.socket(zmq.ROUTER)
        socket.set(zmq.LINGER, 0)
        address = f"ipc://{folder}/engine"
        socket.bind(address)
        command = [sys.executable, str(RIG / "token_engine.py"), address, str(model), "0"]
        settings = {**os.environ, **ucx_environment(one_host=True), "OMP_NUM_THREADS": "1"}
        nowhere = subprocess.DEVNULL
        process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, env=settings)
        try:
            yield _Engine(socket, _registered(socket))
        finally:
            process.terminate()
            process.wait(STOP_S)
            socket.close()


def _registered(socket: zmq.Socket[bytes]) -> bytes:
    """The identity under which the engine has registered, once it is welcome."""
    while True:
        identity, message = _receive(socket)
        if isinstance(message, Register):
            socket.send_multipart([identity, encode(Welcome("bench", "worker", HEARTBEAT_INTERVAL_S))])
            return identity


def _receive(socket: zmq.Socket[bytes]) -> tuple[bytes, FromEngine]:
    if not socket.poll(DEADLINE_MS):
        raise TimeoutError(f"the engine has said nothing for {DEADLINE_MS / 1000:.0f} s")
    identity, payload = socket.recv_multipart()
    return identity, decode_from_engine(payload)
