"""The tokenizer's half of what the endpoint asks for: small work at once, large work off the event loop."""

from __future__ import annotations

from typing import Any

from dynrt.engines.token_bytes import TokenBytes
from dynrt.runtime.offload import Offload
from dynrt.runtime.prompts import PromptEncoder
from dynrt.runtime.requests import TokenizerInfo

SMALL_CHARS = 1024  # tokenized in 0.4 ms; handing it to a thread and back would cost as much CPU time


class Tokenizing:
    """See http.backend.Backend, whose methods of these names these are."""

    def __init__(self, prompts: PromptEncoder, offload: Offload) -> None:
        self._prompts = prompts
        self._offload = offload

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        def encode() -> bytes:
            return self._prompts.encode(text, add_special_tokens=add_special_tokens)

        return encode() if is_small(text) else await self._offload.run(encode)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> bytes:
        def encode() -> bytes:
            return self._prompts.encode_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                **(template_kwargs or {}),
            )

        return encode() if is_small(messages, tools, template_kwargs) else await self._offload.run(encode)

    async def decode(self, token_ids: bytes, *, skip_special_tokens: bool = True) -> str:
        return await self._offload.run(
            lambda: self._prompts.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    async def token_names(self, token_ids: bytes) -> list[str]:
        return await self._offload.run(lambda: self._prompts.token_names(token_ids))

    def tokenizer_info(self) -> TokenizerInfo:
        return self._prompts.info

    def token_bytes(self) -> TokenBytes:
        return self._prompts.token_bytes


def is_small(*values: Any) -> bool:
    """Whether JSON-like `values` hold SMALL_CHARS characters or less; looks no further than that.

    An item of a list or an object counts for one more.
    """
    left = SMALL_CHARS
    parts = [*values]
    for part in parts:  # which grow meanwhile
        kind = type(part)
        if kind is str:
            left -= len(part)
        elif kind is dict or kind is list:
            left -= len(part)
            if left < 0:
                return False
            parts += part
            if kind is dict:
                parts += part.values()
    return left >= 0
