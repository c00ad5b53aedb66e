"""The formats of tool calls by name, and which of them a model writes."""

from __future__ import annotations

import secrets
import string
from functools import lru_cache

import msgspec

from dynrt.runtime.http.answers.tools import hermes, llama, mistral
from dynrt.runtime.http.answers.tools.call_parser import CallParser

_LETTERS = string.ascii_letters + string.digits


class ToolFormat(msgspec.Struct, frozen=True):
    """How a family of models writes calls. `tokens`: special tokens that are part of it, so they must be shown."""

    parser: type[CallParser]
    tokens: tuple[str, ...]
    id_prefix: str = "call_"
    id_chars: int = 24

    def new_call_id(self) -> str:
        """An id for one call; clients send it back with the tool's result, and templates may check its form."""
        return self.id_prefix + "".join(secrets.choice(_LETTERS) for _ in range(self.id_chars))


TOOL_FORMATS = {
    "hermes": ToolFormat(hermes.HermesParser, (hermes.OPEN, hermes.CLOSE)),
    "llama3_json": ToolFormat(llama.LlamaParser, (llama.PYTHON_TAG,)),
    "mistral": ToolFormat(
        mistral.MistralParser,
        (mistral.MARKER, mistral.CALL_ID, mistral.ARGUMENTS),
        id_prefix="",
        id_chars=9,  # Mistral's templates refuse any other length
    ),
}


@lru_cache(maxsize=16)
def tool_format_of(chat_template: str) -> str | None:
    """The name of the format that the model behind `chat_template` was trained on; None if it shows none.

    Templates of Qwen3-Coder have the tags of Hermes, but XML between them.
    """
    if mistral.MARKER in chat_template:
        return "mistral"
    if hermes.OPEN in chat_template and "<function=" not in chat_template:
        return "hermes"
    if llama.PYTHON_TAG in chat_template or '{"name": function name, "parameters":' in chat_template:
        return "llama3_json"
    return None
