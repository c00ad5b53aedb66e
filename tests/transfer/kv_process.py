"""A process with a TransferThread over KV memory that its parent maps as well, steered through a pipe."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar, cast

from dynrt.transfer.events import ConnectPeer
from dynrt.transfer.layout import KvGeometry, KvRegion
from dynrt.transfer.options import TransferOptions
from dynrt.transfer.ucx import ucx_environment

M = TypeVar("M")

DEADLINE_S = 20.0


@dataclass(frozen=True)
class FileEvent:
    """Stands for a CUDA event of the child: it has happened once the file exists."""

    path: Path

    def query(self) -> bool:
        return self.path.exists()


def serve(
    incarnation: str, geometry: KvGeometry, memory_path: str, pipe: Connection, options: TransferOptions
) -> None:
    """The child: build the thread, pass on what it says, do what the parent asks."""
    import ctypes

    from dynrt.transfer.thread import TransferThread

    with open(memory_path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    size = geometry.num_blocks * geometry.layer_block_bytes
    regions = [KvRegion(base + layer * size, size) for layer in range(geometry.num_layers)]
    thread = TransferThread(
        incarnation,
        [geometry],
        [regions],
        "here",
        pipe.send,
        pipe.send,
        lambda error: pipe.send(repr(error)),
        options,
    )
    thread.start()
    pipe.send((thread.agent_metadata, thread.region_addresses))
    while (asked := pipe.recv()) is not None:
        method, arguments = asked
        getattr(thread, method)(*arguments)
    pipe.send(("open", thread.open_handoffs))
    thread.stop(5.0)


class KvProcess:
    """The parent's view of one such process."""

    def __init__(
        self, incarnation: str, geometry: KvGeometry, directory: Path, options: TransferOptions
    ) -> None:
        self.incarnation, self.geometry = incarnation, geometry
        path = directory / incarnation
        with open(path, "wb") as file:
            file.truncate(geometry.num_layers * geometry.num_blocks * geometry.layer_block_bytes)
        with open(path, "r+b") as file:
            self.memory = mmap.mmap(file.fileno(), 0)
        context = multiprocessing.get_context("spawn")
        self._pipe, childs_end = context.Pipe()
        arguments = incarnation, geometry, str(path), childs_end, options
        self.process = context.Process(target=serve, args=arguments)
        self.process.start()
        childs_end.close()
        self.said: list[Any] = []
        self.metadata: list[bytes] = []
        self.addresses: list[list[int]] = []

    def await_start(self) -> None:
        self.metadata, self.addresses = self._recv()

    def post(self, event: object) -> None:
        self._pipe.send(("post", (event,)))

    def step_begins(self, ready: list[Any]) -> None:
        self._pipe.send(("step_begins", (ready,)))

    def layer_written(self, layer: int, event: FileEvent | None = None) -> None:
        self._pipe.send(("layer_written", (layer, event)))

    def expect(self, kind: type[M], handoff: tuple[bytes, int] | None = None) -> M:
        """The next message or order of that kind, about that handoff; others are kept in `said`."""
        deadline = time.monotonic() + DEADLINE_S
        checked = 0
        while True:
            for index in range(checked, len(self.said)):
                if _is_about(self.said[index], kind, handoff):
                    return cast(M, self.said.pop(index))
            checked = len(self.said)
            assert time.monotonic() < deadline, f"no {kind.__name__}, only {self.said}"
            self.said.append(self._recv())

    def block(self, layer: int, block: int) -> slice:
        """Where a block lies in `memory`."""
        size = self.geometry.layer_block_bytes
        start = (layer * self.geometry.num_blocks + block) * size
        return slice(start, start + size)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def stop(self) -> int:
        """In good order; the number of handoffs that were open."""
        self._pipe.send(None)
        while True:
            said = self._recv()
            if isinstance(said, tuple) and said[0] == "open":
                break
            self.said.append(said)
        self.process.join(DEADLINE_S)
        assert self.process.exitcode == 0, f"{self.incarnation} ended with {self.process.exitcode}"
        return int(said[1])

    def _recv(self) -> Any:
        assert self._pipe.poll(DEADLINE_S), f"{self.incarnation} says nothing; so far {self.said}"
        return self._pipe.recv()


def _is_about(said: Any, kind: type[Any], handoff: tuple[bytes, int] | None) -> bool:
    return isinstance(said, kind) and (handoff is None or (said.key, said.epoch) == handoff)


class KvProcesses:
    """Starts processes whose UCX is confined to loopback and `transports`; `close` leaves none behind."""

    def __init__(self, transports: str, geometry: KvGeometry, directory: Path) -> None:
        self.transports, self._geometry, self._directory = transports, geometry, directory
        self._started: list[KvProcess] = []

    def start(self, incarnation: str, options: TransferOptions | None = None) -> KvProcess:
        environment = {**ucx_environment(one_host=True), "UCX_TLS": self.transports, "OMP_NUM_THREADS": "1"}
        before = {name: os.environ.get(name) for name in environment}
        os.environ.update(environment)
        try:
            process = KvProcess(incarnation, self._geometry, self._directory, options or TransferOptions())
            self._started.append(process)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        return self._started[-1]

    def close(self) -> None:
        for process in self._started:
            process.kill()


def connect(prefill: KvProcess, decode: KvProcess) -> ConnectPeer:
    """What the runtime tells the prefill end of that decode worker."""
    return ConnectPeer(
        decode.incarnation, decode.metadata, decode.addresses, [decode.geometry], will_push=True
    )
