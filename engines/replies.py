"""From sampled tokens to the text that clients get: one text stream per request of this engine process."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tokenizers import Tokenizer

from dynrt.engines.protocol import Token
from dynrt.engines.text import TextStream
from dynrt.runtime.logs import trace_fields
from dynrt.runtime.messages import FinishReason, Submit, TextDelta, TokenDelta, unpack_ids
from dynrt.transfer.events import HandoffId

log = logging.getLogger("dynrt.engine")


class Replies:
    """Turns each step's tokens into deltas, and ends a request whose text runs into a stop string."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._open: dict[HandoffId, tuple[Submit, TextStream]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(self, submit: Submit, output_ids: Sequence[int], chars_emitted: int) -> None:
        """The request's next token here is the one behind `output_ids`; `chars_emitted` of their text were sent."""
        sampling = submit.sampling
        stream = TextStream.resume(
            self._tokenizer,
            unpack_ids(submit.prompt_ids),
            output_ids,
            chars_emitted,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            shown_special_tokens=sampling.shown_special_tokens,
        )
        self._open[submit.key, submit.epoch] = submit, stream

    def close(self, key: bytes, epoch: int) -> None:
        self._open.pop((key, epoch), None)

    def close_all(self) -> None:
        self._open.clear()

    def tell(self, tokens: Sequence[Token]) -> tuple[list[TokenDelta], list[TextDelta]]:
        """What a step's report says of these tokens.

        Tokens of requests that are closed here (cancelled, or stopped by their text) are left out.
        """
        deltas: list[TokenDelta] = []
        texts: list[TextDelta] = []
        told: set[HandoffId] = set()
        for token in tokens:
            request = token.key, token.epoch
            opened = self._open.get(request)
            if opened is None:
                continue
            delta = self._delta(token, *opened)
            if isinstance(delta, TokenDelta):
                deltas.append(delta)
            elif request in told:
                deltas.append(delta.whole(*request))
            else:
                texts.append(delta)
            told.add(request)
        return deltas, texts

    def _delta(self, token: Token, submit: Submit, stream: TextStream) -> TokenDelta | TextDelta:
        is_failure = token.finish_reason == "error"
        delta = self._failed(token, submit) if is_failure else self._worded(token, submit, stream)
        if isinstance(delta, TokenDelta) and (delta.finish_reason is not None or submit.purpose == "prefill"):
            self.close(token.key, token.epoch)
        return delta

    def _failed(self, token: Token, submit: Submit) -> TokenDelta:
        fields = {"request": token.key.hex(), "reason": token.error, **trace_fields(submit.traceparent)}
        log.warning("request failed", extra=fields)
        return TokenDelta(
            token.key,
            token.epoch,
            [],
            "",
            "error",
            error=token.error or "the engine failed",
            is_refusal=token.is_refusal,
        )

    def _worded(self, token: Token, submit: Submit, stream: TextStream) -> TokenDelta | TextDelta:
        hidden = token.finish_reason == "stop" and not submit.sampling.include_stop_str_in_output
        piece = stream.push([] if hidden else [token.token_id])
        text = piece.text
        finish: FinishReason | None = token.finish_reason
        reason: str | int | None = token.stop_reason
        if piece.stopped is not None:
            finish, reason = "stop", piece.stopped
        elif finish is not None:
            text += stream.finish()
        frame = submit.frame
        if frame is not None and finish is None and token.is_plain and submit.purpose != "prefill":
            return TextDelta(submit.number, token.token_id, frame.chunk(text), len(text))
        return TokenDelta(
            token.key,
            token.epoch,
            [token.token_id],
            text if frame is None else "",
            finish,
            reason,
            token.cached_tokens,
            logprobs=None if token.logprob is None else [token.logprob],
            prompt_logprobs=token.prompt_logprobs,
            frames=frame.around(text) if frame is not None and text else b"",
            frame_chars=len(text) if frame is not None else 0,
            admitted_at=token.admitted_at,
            kv_transfer_params=token.kv_transfer_params,
        )
