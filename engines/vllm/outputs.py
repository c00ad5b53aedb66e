"""From one request's outputs, as vLLM tells them, to tokens of the Engine protocol."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm import CompletionOutput, RequestOutput

from dynrt.engines.protocol import EngineRequest, Token
from dynrt.engines.vllm.sampling import prompt_logprobs, token_logprob
from dynrt.runtime.messages import FinishReason, TokenLogprob

NO_TOKEN = -1  # the token_id of a Token that carries an error
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "repetition": "stop"}


@dataclass
class RequestTokens:
    """A request that runs in vLLM under `name`."""

    name: str
    asked: EngineRequest
    eos_token_ids: Collection[int]
    cached_tokens: int | None = None  # its own prefix hit, where vLLM counts what was loaded as well
    admitted_at: float | None = None  # as in Token
    has_begun: bool = False

    def read(self, output: RequestOutput) -> Iterator[Token]:
        """The tokens of one step. What belongs to the whole step goes with the first or the last of them."""
        (completion,) = output.outputs
        if completion.finish_reason not in (None, *_FINISH_REASONS):
            yield self._failed(completion)
            return
        last = len(completion.token_ids) - 1
        for index, token_id in enumerate(completion.token_ids):
            finish = self._finish(completion) if index == last else None
            is_first, self.has_begun = not self.has_begun, True
            yield Token(
                self.asked.key,
                self.asked.epoch,
                token_id,
                finish,
                self._stop_reason(completion) if finish == "stop" else None,
                self._cached_tokens(output) if is_first else None,
                logprob=self._logprob(completion, index),
                prompt_logprobs=self._prompt_logprobs(output) if is_first else None,
                admitted_at=self.admitted_at if is_first else None,
                kv_transfer_params=_packed(output.kv_transfer_params) if index == last else b"",
            )

    def _failed(self, completion: CompletionOutput) -> Token:
        error = f"vLLM ended the request ({completion.finish_reason}); the engine's log says why"
        return Token(self.asked.key, self.asked.epoch, NO_TOKEN, finish_reason="error", error=error)

    def _finish(self, completion: CompletionOutput) -> FinishReason | None:
        if completion.finish_reason is None:
            return None
        finish = _FINISH_REASONS[completion.finish_reason]
        num_asked = self.asked.sampling.max_tokens - len(self.asked.output_ids)
        is_cut = self.asked.prefill_only and finish == "length" and num_asked > 1
        return None if is_cut else finish  # vLLM was asked for one token, the client wants more

    def _stop_reason(self, completion: CompletionOutput) -> int | None:
        """vLLM treats all ends of sequence but the tokenizer's own as stop ids."""
        reason = completion.stop_reason
        if not isinstance(reason, int):
            return None
        is_asked_for = reason in self.asked.sampling.stop_token_ids
        return reason if is_asked_for or reason not in self.eos_token_ids else None

    def _cached_tokens(self, output: RequestOutput) -> int:
        return self.cached_tokens if self.cached_tokens is not None else output.num_cached_tokens or 0

    def _logprob(self, completion: CompletionOutput, index: int) -> TokenLogprob | None:
        if self.asked.sampling.logprobs is None:
            return None
        assert completion.logprobs is not None
        return token_logprob(completion.token_ids[index], completion.logprobs[index], self.asked.sampling)

    def _prompt_logprobs(self, output: RequestOutput) -> list[TokenLogprob | None] | None:
        if not output.prompt_logprobs:
            return None
        prompt_ids = self.asked.prompt_ids
        return prompt_logprobs(prompt_ids, output.prompt_logprobs[: len(prompt_ids)], self.asked.sampling)


def _packed(kv_transfer_params: dict[str, Any] | None) -> bytes:
    """What a connector of vLLM's own tells with a prompt that it keeps."""
    return b"" if kv_transfer_params is None else msgspec.msgpack.encode(kv_transfer_params)
