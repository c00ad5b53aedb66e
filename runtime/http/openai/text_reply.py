"""The answers of POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from dynrt.runtime.http.openai import types as openai
from dynrt.runtime.http.openai.logprobs import TextCursor, prompt_logprobs, scored, text_logprobs
from dynrt.runtime.http.openai.replies import FRAMED_TEXT, Shown, finish_word, frame_of
from dynrt.runtime.http.sse import event
from dynrt.runtime.messages import Frame, unpack_ids
from dynrt.runtime.requests import GenerateOutput

MAX_CHAR_TOKENS = 4  # a character has at most so many bytes, and a token at least one


class TextPrompt(msgspec.Struct, frozen=True):
    """One prompt, packed. `echo`: its text, if answers are to begin with it."""

    packed_ids: bytes
    echo: str | None = None

    @property
    def token_ids(self) -> list[int]:
        return unpack_ids(self.packed_ids)


class TextReply(msgspec.Struct, frozen=True):
    """See replies.Reply."""

    id: str
    created: int
    model: str
    shown: Shown
    prompts: list[TextPrompt]
    choices_per_prompt: int
    _cursors: dict[int, TextCursor] = msgspec.field(default_factory=dict)  # of choices that have begun

    def events(
        self, index: int, output: GenerateOutput, *, first: bool, usage: openai.Usage | UnsetType
    ) -> bytes:
        tells_tokens = self._tells_tokens and bool(output.token_ids)
        if not (output.text or output.finish_reason or tells_tokens or (first and not output.frames)):
            return output.frames
        return output.frames + event(self._completion([self._choice(index, output, first)], usage))

    def frame(self, index: int) -> Frame | None:
        if self._tells_tokens or self._prompt(index).echo is not None:
            return None
        choice = openai.TextChoice(FRAMED_TEXT, None, UNSET, index)
        return frame_of(event(self._completion([choice], UNSET)))

    def usage_event(self, usage: openai.Usage) -> bytes:
        return event(self._completion([], usage))

    def whole(self, outputs: Sequence[GenerateOutput], usage: openai.Usage) -> openai.Completion:
        choices = [self._choice(index, output, first=True) for index, output in enumerate(outputs)]
        return self._completion(choices, usage)

    @property
    def _tells_tokens(self) -> bool:
        return self.shown.token_ids or self.shown.logprobs is not None

    def _prompt(self, index: int) -> TextPrompt:
        return self.prompts[index // self.choices_per_prompt]

    def _choice(self, index: int, output: GenerateOutput, first: bool) -> openai.TextChoice:
        prompt = self._prompt(index)
        finish = finish_word(output)
        return openai.TextChoice(
            (prompt.echo or "") + output.text if first else output.text,
            finish,
            UNSET if finish is None else output.stop_reason,
            index,
            self._logprobs(index, output, first),
            self._prompt_logprobs(prompt, output) if first else UNSET,
            prompt.token_ids if first and self.shown.token_ids else UNSET,
            output.token_ids if self.shown.token_ids else UNSET,
        )

    def _logprobs(self, index: int, output: GenerateOutput, first: bool) -> openai.TextLogprobs | None:
        """Of the output's tokens, and of the prompt's before them where it is echoed."""
        if self.shown.logprobs is None:
            return None
        assert self.shown.vocabulary is not None
        entries = [*scored(output.token_ids, output.logprobs)]
        prompt = self._prompt(index)
        if first and prompt.echo is not None:
            entries = [*scored(prompt.token_ids, output.prompt_logprobs), *entries]
        return text_logprobs(self.shown.vocabulary, entries, self.shown.logprobs, self._cursor(index))

    def _cursor(self, index: int) -> TextCursor:
        cursor = self._cursors.get(index)
        if cursor is None:
            assert self.shown.vocabulary is not None
            prompt = self._prompt(index)
            before = unpack_ids(prompt.packed_ids[-4 * MAX_CHAR_TOKENS :]) if prompt.echo is None else ()
            cursor = self._cursors[index] = TextCursor(self.shown.vocabulary, before, prompt.echo or "")
        return cursor

    def _prompt_logprobs(
        self, prompt: TextPrompt, output: GenerateOutput
    ) -> openai.PromptLogprobs | UnsetType:
        if self.shown.prompt_logprobs is None:
            return UNSET
        assert self.shown.vocabulary is not None
        return prompt_logprobs(
            self.shown.vocabulary, prompt.token_ids, output.prompt_logprobs, self.shown.prompt_logprobs
        )

    def _completion(
        self, choices: list[openai.TextChoice], usage: openai.Usage | UnsetType
    ) -> openai.Completion:
        return openai.Completion(self.id, self.created, self.model, choices, usage)
