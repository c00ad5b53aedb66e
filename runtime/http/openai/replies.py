"""What turns the outputs of a request's choices into the bodies and stream events of one endpoint; pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
from msgspec import UnsetType

from dynrt.engines.token_bytes import TokenBytes
from dynrt.runtime.errors import EngineError
from dynrt.runtime.http.openai import types as openai
from dynrt.runtime.messages import Frame
from dynrt.runtime.requests import GenerateOutput

FRAMED_TEXT = "\ue000"  # stands for the text: of Unicode's private use, so in no id and no model's name


class Reply(Protocol):
    """One endpoint's way of telling what was generated."""

    def events(
        self, index: int, output: GenerateOutput, *, first: bool, usage: openai.Usage | UnsetType
    ) -> bytes:
        """`output` of choice `index` as stream events, none if it shows nothing; with `usage` in each if it is set.

        `first`: the choice has had no events yet. Text that comes in ready frames is passed on as it is.
        """
        ...

    def frame(self, index: int) -> Frame | None:
        """What is around the text in an event of choice `index`. None: its text must come here, not in frames."""
        ...

    def usage_event(self, usage: openai.Usage) -> bytes:
        """The stream's last chunk: no choices, only `usage`."""
        ...

    def whole(self, outputs: Sequence[GenerateOutput], usage: openai.Usage) -> msgspec.Struct:
        """The body of an answer that is not streamed; `outputs`: all of each choice's, joined."""
        ...


MakeReply = Callable[
    [str, int, str], Reply
]  # from the request's id, the time in unix seconds, the model's name


class Shown(msgspec.Struct, frozen=True):
    """What a reply tells beside the text. The numbers are those of alternatives; None: no log probabilities."""

    vocabulary: TokenBytes | None = None  # given with either of the next two
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False


def finish_word(output: GenerateOutput) -> openai.FinishWord | None:
    """OpenAI's word for the end. A request that ended otherwise has failed: raises EngineError."""
    match output.finish_reason:
        case "cancelled" | "error" as failure:
            raise EngineError(f"the engine ended the request without completing it ({failure})")
        case finish:
            return finish


def frame_of(event_of_text: bytes) -> Frame:
    """The frame of an event that tells FRAMED_TEXT."""
    prefix, _, suffix = event_of_text.partition(msgspec.json.encode(FRAMED_TEXT))
    return Frame(prefix, suffix)
