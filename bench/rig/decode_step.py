"""How much longer a decode step of the native engine takes for the text work of the step before it.

That work (detokenizing, stop strings, ready events, encoding the report) is done by another thread of the process,
as in every engine process, so it costs a step what it takes of the interpreter and of the memory's bandwidth.
"""

from __future__ import annotations

import queue
import random
import statistics
import threading
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from dynrt.engines.config import EngineConfig
from dynrt.engines.interpreter import share_interpreter
from dynrt.engines.native.engine import NativeEngine
from dynrt.engines.protocol import EngineRequest, StepOutput
from dynrt.engines.replies import Replies
from dynrt.runtime.messages import SamplingParams, StepReport, Submit, encode, pack_ids
from dynrt.transfer.local import BlocksReady
from rig.text_work import FRAME
from rig.token_engine import FIRST_WORD, VOCAB

STREAMS = 64
PROMPT_TOKENS = 8
WARMUP_STEPS = 10


class DecodeSteps(msgspec.Struct, frozen=True):
    """Steps in turn with text work beside them and without. `longer`: by what share, each beside the one after it."""

    with_text_s: float  # medians
    without_s: float
    longer: float


class _NoHandoff:
    """See engines.protocol.LayerHook."""

    def step_begins(self, ready: list[BlocksReady]) -> None:
        raise AssertionError("there is no handoff here")

    def layer_written(self, layer: int, event: object | None) -> None:
        pass


class _TextThread(threading.Thread):
    """What the control thread of an engine process does with a step's tokens."""

    def __init__(self, replies: Replies) -> None:
        super().__init__(name="text", daemon=True)
        self.steps: queue.SimpleQueue[StepOutput | None] = queue.SimpleQueue()
        self._replies = replies

    def run(self) -> None:
        while (output := self.steps.get()) is not None:
            deltas, texts = self._replies.tell(output.tokens)
            encode(StepReport(deltas, output.load, output.timing, texts=texts))


def measure(model: Path, pairs: int) -> DecodeSteps:
    """`pairs` steps of each kind, of 64 streams."""
    engine = NativeEngine(EngineConfig(str(model), "model", threads=1, max_batch_requests=STREAMS))
    replies = Replies(Tokenizer.from_file(str(model / "tokenizer.json")))
    text = _TextThread(replies)
    submits = _requests(WARMUP_STEPS + 2 * pairs + STREAMS)
    share_interpreter()
    text.start()
    try:
        for submit in submits:
            replies.open(submit, [], 0)
            engine.submit(EngineRequest.of(submit))
        return _alternate(engine, text, pairs)
    finally:
        text.steps.put(None)
        text.join()
        engine.close()


def _alternate(engine: NativeEngine, text: _TextThread, pairs: int) -> DecodeSteps:
    output = engine.step(_NoHandoff())
    for _ in range(WARMUP_STEPS):
        output = engine.step(_NoHandoff())
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * pairs):
        has_text = number % 2 == 0
        if has_text:
            text.steps.put(output)
        output = engine.step(_NoHandoff())
        assert output.timing is not None and len(output.tokens) == STREAMS, "not a step of all streams"
        seconds[has_text].append(output.timing.duration_s)
    ratios = [with_text_s / without_s for without_s, with_text_s in zip(*seconds, strict=True)]
    return DecodeSteps(
        with_text_s=statistics.median(seconds[True]),
        without_s=statistics.median(seconds[False]),
        longer=statistics.median(ratios) - 1,
    )


def _requests(max_tokens: int) -> list[Submit]:
    draw = random.Random(0)
    sampling = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
    return [
        Submit(
            number.to_bytes(16, "big"),
            0,
            "generate",
            pack_ids([draw.randrange(FIRST_WORD, VOCAB) for _ in range(PROMPT_TOKENS)]),
            sampling,
            frame=FRAME,
        )
        for number in range(STREAMS)
    ]
