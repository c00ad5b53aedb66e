"""An engine process whose engine computes nothing: every running request gets a token in each step.

Runs in the project's environment: `token_engine.py ADDRESS MODEL_DIR STEP_S`. All but the engine is what every
engine process has: control thread, text, heartbeats, transfers. It stands behind dynrt's front as sse_engine stands
behind a router's, and as Dynamo's mocker behind its frontend.
"""

from __future__ import annotations

import array
import random
import sys
import time
from collections.abc import Sequence

from dynrt.engines import process
from dynrt.engines.config import EngineConfig
from dynrt.engines.protocol import EngineInfo, EngineRequest, LayerHook, Reservation, StepOutput, Token
from dynrt.planner.events import BlocksStored
from dynrt.runtime.logs import set_up_logs
from dynrt.runtime.messages import EngineLoad, StepTiming
from dynrt.transfer.layout import KvGeometry, KvRegion

VOCAB = 49_152  # of the default model
CONTEXT = 8192
FIRST_WORD = 1000  # ids below may be control tokens or single bytes
GEOMETRY = KvGeometry(
    num_layers=1, num_blocks=65_536, block_size=16, num_kv_heads=1, head_size=1, dtype="float32"
)


class Running:
    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        self.num_tokens = 0


class TokenEngine:
    """See engines.protocol.Engine; for requests that are prefilled where they are decoded."""

    def __init__(self, step_s: float) -> None:
        self.info = EngineInfo("sim", CONTEXT, VOCAB, frozenset(), [GEOMETRY])
        self._step_s = step_s
        self._due = 0.0
        self._running: dict[tuple[bytes, int], Running] = {}
        self._draw = random.Random(0)
        self._memory = array.array("B", bytes(GEOMETRY.num_blocks * GEOMETRY.layer_block_bytes))

    def kv_memory(self) -> list[list[KvRegion]]:
        return [[KvRegion(self._memory.buffer_info()[0], len(self._memory))]]

    def submit(self, request: EngineRequest) -> None:
        self._running[request.key, request.epoch] = Running(request)

    def cancel(self, key: bytes, epoch: int) -> None:
        self._running.pop((key, epoch), None)

    def reserve(self, request: EngineRequest) -> Reservation | None:
        raise AssertionError("there is no handoff here")

    def commit(self, key: bytes, epoch: int, first_token: int | None) -> None:
        raise AssertionError("there is no handoff here")

    def release(self, key: bytes, epoch: int) -> None:
        raise AssertionError("there is no handoff here")

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self, hook: LayerHook) -> StepOutput:
        began_at = time.monotonic()
        self._due = max(self._due + self._step_s, began_at)
        time.sleep(max(0.0, self._due - began_at))
        tokens = [self._token(running) for running in self._running.values()]
        for token in tokens:
            if token.finish_reason is not None:
                del self._running[token.key, token.epoch]
        ended_at = time.monotonic()
        timing = StepTiming(ended_at - began_at, ended_at, 0, 0, len(tokens), 0)
        return StepOutput(tokens, [], self.load(), timing)

    def _token(self, running: Running) -> Token:
        request = running.request
        running.num_tokens += 1
        is_last = running.num_tokens == request.sampling.max_tokens
        return Token(
            request.key,
            request.epoch,
            FIRST_WORD + int(self._draw.random() * (VOCAB - FIRST_WORD)),
            "length" if is_last else None,
            cached_tokens=0 if running.num_tokens == 1 else None,
        )

    def load(self) -> EngineLoad:
        return EngineLoad(running_requests=len(self._running), blocks_total=GEOMETRY.num_blocks)

    def cache_snapshot(self) -> list[BlocksStored]:
        return []

    def close(self) -> None:
        self._running.clear()


def main(arguments: Sequence[str]) -> None:
    address, model_dir, step_s = arguments
    set_up_logs()
    process.open_engine = lambda config: TokenEngine(float(step_s))
    name = model_dir.rstrip("/").rpartition("/")[2]
    process.EngineProcess(EngineConfig(model_dir, name, kind="sim", role="decode"), address, "").run()


if __name__ == "__main__":
    main(sys.argv[1:])
