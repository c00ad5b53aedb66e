"""Two vLLM engines of one process with their transfer threads, which hand prompts to each other in either direction."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_bench import Id, greedy

from dynrt.engines.protocol import EngineRequest, Reservation, Token
from dynrt.transfer.events import Arm, CancelHandoff, Committed, ConnectPeer, PeerConnected, Reserved, Sent
from dynrt.transfer.local import CommitBlocks, PrefillOpened, ReleaseBlocks, ReservationMade
from dynrt.transfer.options import TransferOptions

if TYPE_CHECKING:
    from dynrt.engines.vllm.engine import VllmEngine

DEADLINE_S = 60.0
LEASE_S = 60.0


class Worker:
    """One engine, its transfer thread, and what that says. `verify`: each block is compared before a commit."""

    def __init__(self, name: str, engine: VllmEngine, *, verify: bool = True) -> None:
        from dynrt.transfer.thread import TransferThread

        self.name, self.engine = name, engine
        self.said: queue.Queue[Any] = queue.Queue()
        self.heard: list[Any] = []
        self.tokens: dict[Id, list[Token]] = {}
        self.transfer = TransferThread(
            name,
            engine.info.geometry,
            engine.kv_memory(),
            "here",
            self.said.put,
            self.said.put,
            self.said.put,
            TransferOptions(verify=verify),
            takes_first_token=False,
        )
        self.transfer.start()

    def introduce(self, *, will_push: bool) -> ConnectPeer:
        """To the other one."""
        transfer, geometry = self.transfer, self.engine.info.geometry
        return ConnectPeer(
            self.name, transfer.agent_metadata, transfer.region_addresses, geometry, will_push=will_push
        )

    def turn(self) -> None:
        """Orders of the transfer thread, and a step if there is something to do."""
        while not self.said.empty():
            self._on_message(self.said.get())
        if not self.engine.has_work():
            time.sleep(1e-3)
            return
        for token in self.engine.step(self.transfer).tokens:
            self.tokens.setdefault((token.key, token.epoch), []).append(token)

    def _on_message(self, message: Any) -> None:
        assert not isinstance(message, BaseException), repr(message)
        if isinstance(message, CommitBlocks):
            self.engine.commit(message.key, message.epoch, message.first_token)
        elif isinstance(message, ReleaseBlocks):
            self.engine.release(message.key, message.epoch)
        else:
            self.heard.append(message)

    def take(self, kind: type[Any]) -> Any:
        """The oldest message of that kind; None if there is none."""
        found = next((message for message in self.heard if isinstance(message, kind)), None)
        if found is not None:
            self.heard.remove(found)
        return found

    def ids(self, request_id: Id) -> list[int]:
        return [token.token_id for token in self.tokens.get(request_id, [])]

    def local(self, prompt: Sequence[int], request_id: Id, **fields: object) -> list[int]:
        """Everything here, to its end."""
        self.engine.submit(EngineRequest(*request_id, prompt, greedy(), **fields))
        while self.engine.has_work():
            self.turn()
        return self.ids(request_id)

    def stop(self) -> None:
        assert self.transfer.open_handoffs == 0
        self.transfer.stop(5.0)
        self.engine.close()


class Pair:
    """Connected in both directions."""

    def __init__(self, one: Worker, other: Worker) -> None:
        self._workers = one, other
        self._num_requests = 0
        for source, target in ((one, other), (other, one)):
            target.transfer.post(source.introduce(will_push=False))
            source.transfer.post(target.introduce(will_push=True))
            connected = self.expect(source, PeerConnected)
            assert connected.error is None, connected

    def new_id(self) -> Id:
        self._num_requests += 1
        return self._num_requests.to_bytes(16, "big"), 1

    def run_until(self, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not (found := condition()):
            assert time.monotonic() < deadline, [worker.heard for worker in self._workers]
            for worker in self._workers:
                worker.turn()
        return found

    def expect(self, worker: Worker, kind: type[Any]) -> Any:
        return self.run_until(lambda: worker.take(kind))

    def open(self, source: Worker, target: Worker, prompt: Sequence[int], salt: str) -> Id:
        """A handoff under way; decode's blocks are known to prefill before it computes."""
        request_id = self.new_id()
        request = EngineRequest(*request_id, prompt, greedy(), salt=salt)
        made: Reservation = self.run_until(lambda: target.engine.reserve(request))
        reserved = made.first_block, made.block_ids, LEASE_S, len(prompt)
        target.transfer.post(ReservationMade(*request_id, source.name, *reserved))
        told = self.expect(target, Reserved)
        source.transfer.post(PrefillOpened(*request_id))
        source.transfer.post(Arm(*request_id, target.name, told.first_block, told.block_ids, len(prompt)))
        source.engine.submit(EngineRequest(*request_id, prompt, greedy(), salt=salt, prefill_only=True))
        return request_id

    def hand_off(self, source: Worker, target: Worker, prompt: Sequence[int], salt: str = "") -> list[int]:
        """The tokens of decode."""
        request_id = self.open(source, target, prompt, salt)
        self.expect(target, Committed)
        self.expect(source, Sent)
        self.run_until(lambda: not any(worker.engine.has_work() for worker in self._workers))
        return target.ids(request_id)

    def cancel(self, source: Worker, target: Worker, request_id: Id) -> None:
        for worker in (source, target):
            worker.transfer.post(CancelHandoff(*request_id, "test"))
            worker.engine.cancel(*request_id)
