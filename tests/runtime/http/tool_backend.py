"""A scripted backend whose model reasons and calls tools: support for tests of chats, responses and messages."""

from __future__ import annotations

from typing import Any

import msgspec
from scripted_backend import END, ScriptedBackend

from dynrt.runtime.requests import GenerateOutput, TokenizerInfo

QWEN3 = "<tool_call>{{ call | tojson }}</tool_call><think></think>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "now", "parameters": SCHEMA}}
ARGUMENTS = '{"city": "Zürich 🦜"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}"


class ToolBackend(ScriptedBackend):
    """`says` scripts an answer; `prompt_end` is what prompts end with; `tools` are those of each chat."""

    def __init__(self) -> None:
        super().__init__()
        self.chat_template = QWEN3
        self.tool_template: str | None = None
        self.prompt_end = "<|assistant|>"
        self.tools: list[list[dict[str, Any]] | None] = []
        self.says(ANSWER)

    def says(self, text: str, finish: Any = "stop", stop_reason: Any = None) -> None:
        """`text`, three characters in an output; each is a token."""
        pieces = [text[start : start + 3] for start in range(0, len(text), 3)]
        self.script = [
            *[GenerateOutput([ord(character) for character in piece], piece) for piece in pieces],
            GenerateOutput([END], "", finish, stop_reason),
        ]

    def takes_grammar(self) -> None:
        self.cards = [msgspec.structs.replace(card, takes_grammar=True) for card in self.cards]

    async def encode_chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None, **options: Any
    ) -> bytes:
        self.tools.append(tools)
        return await super().encode_chat(messages, tools=tools, **options)

    async def decode(self, token_ids: bytes, *, skip_special_tokens: bool = True) -> str:
        return self.prompt_end

    def tokenizer_info(self) -> TokenizerInfo:
        templates = {"chat_template": self.chat_template, "tool_template": self.tool_template}
        return msgspec.structs.replace(super().tokenizer_info(), **templates)
