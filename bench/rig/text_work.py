"""What an engine's control thread spends on text: detokenizing, searching stop strings, events, encoding a step."""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from dynrt.engines.protocol import Token
from dynrt.engines.replies import Replies
from dynrt.runtime.messages import EngineLoad, Frame, SamplingParams, StepReport, Submit, encode, pack_ids

STREAMS = 64
STEPS = 128
REPEATS = 9
FRAME = Frame(
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","created":1700000000,"model":"model",'
    b'"choices":[{"delta":{"content":',
    b'},"finish_reason":null,"index":0}],"object":"chat.completion.chunk"}\n\n',
)


class TextWork(msgspec.Struct, frozen=True):
    """CPU seconds for a token: all of it, and what of it making events adds."""

    token_s: float
    frame_s: float


def measure(model: Path) -> TextWork:
    """The best of several turns, with frames and without in turn."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    turns = [(_token_s(tokenizer, FRAME), _token_s(tokenizer, None)) for _ in range(REPEATS)]
    framed_s, plain_s = (min(side) for side in zip(*turns, strict=True))
    return TextWork(framed_s, max(0.0, framed_s - plain_s))


def _token_s(tokenizer: Tokenizer, frame: Frame | None) -> float:
    replies = Replies(tokenizer)
    keys = [number.to_bytes(16, "big") for number in range(STREAMS)]
    for key in keys:
        submit = Submit(key, 0, "generate", pack_ids([1, 2, 3]), SamplingParams(10_000), frame=frame)
        replies.open(submit, [], 0)
    draw = random.Random(0)
    steps = [[Token(key, 0, draw.randrange(100, 40_000)) for key in keys] for _ in range(STEPS)]
    began = time.thread_time()
    for tokens in steps:
        deltas, texts = replies.tell(tokens)
        encode(StepReport(deltas, EngineLoad(), None, texts=texts))
    return (time.thread_time() - began) / (STREAMS * STEPS)
