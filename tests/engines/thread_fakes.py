"""Stand-ins for what surrounds the threads of an engine process: engine, transfer, text, and the runtime's socket."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import zmq

from dynrt.engines.protocol import EngineInfo, EngineRequest, Reservation, StepOutput, Token
from dynrt.planner.events import BlocksStored, CacheEvent
from dynrt.runtime.errors import InvalidRequestError
from dynrt.runtime.messages import (
    EngineLoad,
    FromEngine,
    SamplingParams,
    Submit,
    TextDelta,
    ToEngine,
    TokenDelta,
    decode_from_engine,
    encode,
    pack_ids,
)
from dynrt.transfer.layout import KvGeometry

DEADLINE_S = 10.0
KEY = b"k" * 16
GEOMETRY = KvGeometry(2, 8, 4, num_kv_heads=1, head_size=4, dtype="float32")

T = TypeVar("T")


class Heard:
    """What a thread says, to be awaited; `log` keeps all of it in order."""

    def __init__(self) -> None:
        self._news: queue.Queue[Any] = queue.Queue()
        self.log: list[Any] = []

    def __call__(self, news: Any) -> None:
        self.log.append(news)
        self._news.put(news)

    post = __call__  # the transfer thread's name for it

    def next(self, kind: type[T] | tuple[type[T], ...]) -> T:
        """The next one of that kind; others before it are passed over."""
        while True:
            news = self._news.get(timeout=DEADLINE_S)
            if isinstance(news, kind):
                return news


class FakeTransfer(Heard):
    """Also the layer hook of the engine."""

    open_handoffs = 3

    def step_begins(self, ready: object) -> None:
        raise AssertionError("the fake engine has no layers")

    layer_written = step_begins


class FakeEngine:
    """`free_blocks` to reserve; each step plays the next of `steps`, which is all the work there is."""

    info = EngineInfo("fake", 32, 256, frozenset({0}), [GEOMETRY])

    def __init__(self, free_blocks: int = GEOMETRY.num_blocks) -> None:
        self.free_blocks = free_blocks
        self.held: dict[tuple[bytes, int], int] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.steps: list[StepOutput | Exception] = []

    def submit(self, request: EngineRequest) -> None:
        self.calls.append(("submit", request.key, request.epoch))

    def cancel(self, key: bytes, epoch: int) -> None:
        self.calls.append(("cancel", key, epoch))

    def reserve(self, request: EngineRequest) -> Reservation | None:
        needed = -(-len(request.prompt_ids) // GEOMETRY.block_size)
        if needed > GEOMETRY.num_blocks:
            raise InvalidRequestError(f"{needed} blocks are more than there are")
        if needed > self.free_blocks:
            return None
        self.free_blocks -= needed
        self.held[request.key, request.epoch] = needed
        return Reservation(0, list(range(needed)))

    def commit(self, key: bytes, epoch: int, first_token: int | None) -> None:
        self.calls.append(("commit", key, epoch, first_token))

    def release(self, key: bytes, epoch: int) -> None:
        self.free_blocks += self.held.pop((key, epoch), 0)
        self.calls.append(("release", key, epoch))

    def has_work(self) -> bool:
        return bool(self.steps)

    def step(self, hook: object) -> StepOutput:
        played = self.steps.pop(0)
        if isinstance(played, Exception):
            raise played
        return played

    def load(self) -> EngineLoad:
        return EngineLoad(blocks_total=GEOMETRY.num_blocks, blocks_active=sum(self.held.values()))

    def cache_snapshot(self) -> list[BlocksStored]:
        return []

    def close(self) -> None:
        raise AssertionError("the process closes it, not a thread")


def step_output(tokens: Sequence[Token] = (), events: Sequence[CacheEvent] = ()) -> StepOutput:
    return StepOutput(list(tokens), list(events), EngineLoad(), None)


class FakeReplies:
    """Text of requests: none; a token 9 ends its request as a stop string would."""

    def __init__(self) -> None:
        self.open_ids: set[tuple[bytes, int]] = set()
        self.opened: list[tuple[list[int], int]] = []

    def __len__(self) -> int:
        return len(self.open_ids)

    def open(self, submit: Submit, output_ids: Sequence[int], chars_emitted: int) -> None:
        self.open_ids.add((submit.key, submit.epoch))
        self.opened.append((list(output_ids), chars_emitted))

    def close(self, key: bytes, epoch: int) -> None:
        self.open_ids.discard((key, epoch))

    def close_all(self) -> None:
        self.open_ids.clear()

    def tell(self, tokens: Sequence[Token]) -> tuple[list[TokenDelta], list[TextDelta]]:
        deltas = [
            TokenDelta(one.key, one.epoch, [one.token_id], "", "stop" if one.token_id == 9 else None)
            for one in tokens
        ]
        return deltas, []


class FakeRuntime:
    """The runtime's end of the control socket, read by the test."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/control"
        self._context = zmq.Context()
        self.open()

    def open(self) -> None:
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(self.address)

    def shut(self) -> None:
        """Nobody answers at the address any more."""
        self._socket.close()

    def next(self, kind: type[T]) -> tuple[str, T]:
        """Identity of the sender and the next message of that kind; others before it are passed over."""
        while True:
            assert self._socket.poll(1000 * DEADLINE_S), f"no {kind.__name__} came"
            identity, payload = self._socket.recv_multipart()
            message: FromEngine = decode_from_engine(payload)
            if isinstance(message, kind):
                return identity.decode(), message

    def tell(self, identity: str, message: ToEngine) -> None:
        self._socket.send_multipart((identity.encode(), encode(message)))

    def close(self) -> None:
        self._context.destroy(linger=0)


def submit(purpose: str = "generate", key: bytes = KEY, epoch: int = 0, **fields: Any) -> Submit:
    return Submit(key, epoch, purpose, pack_ids([5, 6, 7]), SamplingParams(8), **fields)


def engine_request(num_tokens: int, key: bytes = KEY, **fields: Any) -> EngineRequest:
    return EngineRequest(key, 0, list(range(num_tokens)), SamplingParams(8), **fields)


def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that other threads bring about."""
    pause = threading.Event()
    for _ in range(int(DEADLINE_S / 0.005)):
        if condition():
            return
        pause.wait(0.005)
    raise AssertionError(f"not within {DEADLINE_S:g} s")
