"""What the endpoint asks of the runtime; `dynrt.runtime.Runtime` is one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any, Protocol

from dynrt.engines.token_bytes import TokenBytes
from dynrt.runtime.frame_sink import FrameSink
from dynrt.runtime.http_counts import HttpCounts
from dynrt.runtime.requests import GenerateOutput, GenerateRequest, ModelCard, TokenizerInfo


class Backend(Protocol):
    """The runtime as the endpoint sees it. Every method may raise a DynrtError."""

    def generate(
        self, request: GenerateRequest, sink: FrameSink | None = None
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Outputs until one carries a finish_reason; closing the generator cancels the request everywhere.

        Events of a request with a frame may go to `sink` instead, while the generator is awaited.
        """
        ...

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        """Token ids of `text`, packed (messages.pack_ids)."""
        ...

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> bytes:
        """Token ids of `messages` behind the model's chat template, packed."""
        ...

    async def decode(self, token_ids: bytes, *, skip_special_tokens: bool = True) -> str:
        """The text of packed ids."""
        ...

    async def token_names(self, token_ids: bytes) -> list[str]:
        """Each of packed ids as the vocabulary spells it."""
        ...

    def tokenizer_info(self) -> TokenizerInfo:
        """What a client must know to prepare prompts itself."""
        ...

    def token_bytes(self) -> TokenBytes:
        """What each token stands for."""
        ...

    def models(self) -> list[ModelCard]:
        """What is served; empty while loading."""
        ...

    def ready(self) -> str | None:
        """None when a request could be served from end to end, else why not."""
        ...

    def draining(self) -> bool:
        """Whether the runtime takes no new requests because it is about to end."""
        ...

    def count_http(self, counts: HttpCounts) -> None:
        """What the endpoint has answered since it said so last; in the metrics from now on."""
        ...

    async def metrics(self) -> bytes:
        """All metrics in Prometheus' text format."""
        ...
