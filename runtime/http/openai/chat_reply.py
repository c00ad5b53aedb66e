"""The answers of POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from dynrt.runtime.http.openai import types as openai
from dynrt.runtime.http.openai.logprobs import chat_logprobs, prompt_logprobs
from dynrt.runtime.http.openai.replies import FRAMED_TEXT, Shown, finish_word, frame_of
from dynrt.runtime.http.sse import event
from dynrt.runtime.messages import Frame, unpack_ids
from dynrt.runtime.requests import GenerateOutput


class ChatReply(msgspec.Struct, frozen=True):
    """See replies.Reply. `prompt_ids`: packed."""

    id: str
    created: int
    model: str
    shown: Shown
    prompt_ids: bytes

    def events(
        self, index: int, output: GenerateOutput, *, first: bool, usage: openai.Usage | UnsetType
    ) -> bytes:
        finish = finish_word(output)
        events = b""
        if first or output.text or (self._tells_tokens and output.token_ids):
            told_ids = self._prompt_token_ids() if first and index == 0 else UNSET
            events += self._chunk([self._part(index, output, first)], usage, told_ids)
        events += output.frames
        if finish is not None:
            end = openai.ChunkChoice(openai.Delta(), finish, output.stop_reason, index)
            events += self._chunk([end], usage)
        return events

    def frame(self, index: int) -> Frame | None:
        if self._tells_tokens:
            return None
        choice = openai.ChunkChoice(openai.Delta(content=FRAMED_TEXT), index=index)
        return frame_of(self._chunk([choice], UNSET))

    def usage_event(self, usage: openai.Usage) -> bytes:
        return self._chunk([], usage)

    def whole(self, outputs: Sequence[GenerateOutput], usage: openai.Usage) -> openai.ChatCompletion:
        return openai.ChatCompletion(
            self.id,
            self.created,
            self.model,
            [self._choice(index, output) for index, output in enumerate(outputs)],
            usage,
            self._prompt_logprobs(outputs[0]),
            self._prompt_token_ids(),
        )

    @property
    def _tells_tokens(self) -> bool:
        return self.shown.token_ids or self.shown.logprobs is not None

    def _part(self, index: int, output: GenerateOutput, first: bool) -> openai.ChunkChoice:
        return openai.ChunkChoice(
            openai.Delta(role="assistant" if first else UNSET, content=output.text),
            index=index,
            logprobs=self._logprobs(output) or UNSET,
            token_ids=self._token_ids(output),
        )

    def _choice(self, index: int, output: GenerateOutput) -> openai.ChatChoice:
        finish = finish_word(output)
        assert finish is not None, "a whole output says why it ended"
        return openai.ChatChoice(
            openai.Message(output.text),
            finish,
            output.stop_reason,
            index,
            self._logprobs(output),
            self._token_ids(output),
        )

    def _logprobs(self, output: GenerateOutput) -> openai.ChatLogprobs | None:
        if self.shown.logprobs is None:
            return None
        assert self.shown.vocabulary is not None
        return chat_logprobs(self.shown.vocabulary, output.token_ids, output.logprobs, self.shown.logprobs)

    def _token_ids(self, output: GenerateOutput) -> list[int] | UnsetType:
        return output.token_ids if self.shown.token_ids else UNSET

    def _prompt_token_ids(self) -> list[int] | UnsetType:
        return unpack_ids(self.prompt_ids) if self.shown.token_ids else UNSET

    def _prompt_logprobs(self, output: GenerateOutput) -> openai.PromptLogprobs | UnsetType:
        if self.shown.prompt_logprobs is None:
            return UNSET
        assert self.shown.vocabulary is not None
        return prompt_logprobs(
            self.shown.vocabulary,
            unpack_ids(self.prompt_ids),
            output.prompt_logprobs,
            self.shown.prompt_logprobs,
        )

    def _chunk(
        self,
        choices: list[openai.ChunkChoice],
        usage: openai.Usage | UnsetType,
        prompt_token_ids: list[int] | UnsetType = UNSET,
    ) -> bytes:
        return event(openai.ChatChunk(self.id, self.created, self.model, choices, usage, prompt_token_ids))
