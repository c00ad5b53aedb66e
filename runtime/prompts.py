"""From prompts to token ids: chat messages through the model's template, or plain text.

Imports neither torch nor transformers. Nothing here changes once it is built, so it may be called in any thread;
tokenizing and rendering block, so the runtime does that outside its event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from dynrt.engines.token_bytes import TokenBytes, token_bytes
from dynrt.runtime.chat_messages import template_messages
from dynrt.runtime.chat_template import ChatTemplate
from dynrt.runtime.control_tokens import ControlTokens, scrub
from dynrt.runtime.errors import InvalidRequestError, ModelLoadError
from dynrt.runtime.final_message import up_to_mark, with_marked_end
from dynrt.runtime.messages import pack_ids, unpack_ids
from dynrt.runtime.requests import TokenizerInfo
from dynrt.runtime.token_cache import TokenCache
from dynrt.runtime.token_cuts import cuts_of

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # threads of its own help no batch of one

_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class PromptEncoder:
    """See the module. Made by `from_dir`."""

    def __init__(
        self, tokenizer: Tokenizer, templates: Mapping[str, ChatTemplate], special_tokens: Mapping[str, str]
    ) -> None:
        self._tokenizer = tokenizer
        self._templates = templates
        self._special_tokens = special_tokens
        self._control_tokens = ControlTokens(tokenizer)
        self._bos = _bos_that_is_added(tokenizer, special_tokens)
        self._cache = TokenCache(partial(self._ids, add_special_tokens=False), cuts_of(tokenizer))

    @classmethod
    def from_dir(cls, model_dir: str | Path, *, now: Callable[[], datetime] = datetime.now) -> PromptEncoder:
        """From tokenizer.json, tokenizer_config.json and chat_template.jinja; ModelLoadError if unreadable.

        `now`: what the date that some templates write is taken from.
        """
        path = Path(model_dir)
        config = _tokenizer_config(path)
        sources = _template_sources(path, config)
        templates = {name: ChatTemplate(source, now) for name, source in sources.items()}
        return cls(_load_tokenizer(path), templates, _special_tokens(config))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt as text. InvalidRequestError if there is no template, or if it refuses the messages.

        `continue_final_message`: it ends with the last message's text, not with what the template puts behind it.
        """
        assert not (add_generation_prompt and continue_final_message), "one message begins, or one goes on"
        return self._control_tokens.reveal(
            self._render(messages, add_generation_prompt, continue_final_message, tools, kwargs)
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> bytes:
        """The prompt as packed ids. Control tokens are the template's; in messages, tools, kwargs they are text."""
        assert not (add_generation_prompt and continue_final_message), "one message begins, or one goes on"
        rendered = self._render(messages, add_generation_prompt, continue_final_message, tools, kwargs)
        _refuse_surrogates(rendered)
        ids = self._cache.ids(rendered)
        if self._bos is not None and not ids.startswith(self._bos):  # else the template has written it
            return self._bos + ids
        return ids

    def encode(self, text: str, *, add_special_tokens: bool) -> bytes:
        """Packed ids of `text`, in which control tokens count as such: whoever sends it wrote the whole prompt."""
        _refuse_surrogates(text)
        packed = pack_ids(self._ids(scrub(text), add_special_tokens=add_special_tokens))
        if self._bos is not None and packed.startswith(2 * self._bos):  # written and added
            return packed[len(self._bos) :]
        return packed

    def decode(self, packed_ids: bytes, *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(unpack_ids(packed_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_names(self, packed_ids: bytes) -> list[str]:
        """Each token as the vocabulary spells it; empty for an id without a token."""
        return [self._tokenizer.id_to_token(token_id) or "" for token_id in unpack_ids(packed_ids)]

    @cached_property
    def info(self) -> TokenizerInfo:
        template, tool_template = self._templates.get("default"), self._templates.get("tool_use")
        token = self._special_tokens.get
        return TokenizerInfo(
            vocab_size=self._tokenizer.get_vocab_size(),
            bos_token=token("bos_token"),
            eos_token=token("eos_token"),
            unk_token=token("unk_token"),
            pad_token=token("pad_token"),
            chat_template=None if template is None else template.source,
            tool_template=None if tool_template is None else tool_template.source,
        )

    @property
    def token_bytes(self) -> TokenBytes:
        """What each token stands for. ModelLoadError if that cannot be told."""
        return token_bytes(self._tokenizer)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> str:
        """The template's text, with control tokens of the user's still hidden."""
        template = self._template_for(tools)
        prepared = template_messages(
            messages, wants_parts=template.wants_parts, knows_developer=template.knows_developer
        )
        shown, shown_tools, shown_kwargs = self._control_tokens.hide([prepared, tools or None, kwargs])
        variables = {
            **self._special_tokens,
            "documents": None,
            **shown_kwargs,
            "messages": shown,
            "tools": shown_tools,
            "add_generation_prompt": add_generation_prompt,
        }
        if not continue_final_message:
            return template.render(variables)
        *earlier, last = shown
        marked, final_text = with_marked_end(last)
        return up_to_mark(template.render({**variables, "messages": [*earlier, marked]}), final_text)

    def _template_for(self, tools: Sequence[Mapping[str, Any]] | None) -> ChatTemplate:
        template = (self._templates.get("tool_use") if tools else None) or self._templates.get("default")
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions with a whole prompt"
            )
        return template

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # A quarter cheaper than `encode`, which also tells where in the text each token lies.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids


def _refuse_surrogates(text: str) -> None:
    """Only Python's strings can hold half a pair; tokenizers would blame the type."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the prompt holds half a surrogate pair at {error.start}") from error


def _load_tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelLoadError(f"cannot read {file}: {error}") from error
    tokenizer.no_padding()  # both may be stored in the file, left over from training
    tokenizer.no_truncation()
    return tokenizer


def _tokenizer_config(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise ModelLoadError(f"cannot read {file}: {error}") from error


def _template_sources(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """By name; a model with one template calls it "default"."""
    file = path / "chat_template.jinja"
    if file.is_file():
        return {"default": file.read_text(encoding="utf-8")}
    stored = config.get("chat_template")
    if stored is None:
        return {}
    if isinstance(stored, str):
        return {"default": stored}
    try:
        return {entry["name"]: entry["template"] for entry in stored}
    except (KeyError, TypeError) as error:
        raise ModelLoadError(
            f"chat_template in {path}/tokenizer_config.json is neither text nor a list"
        ) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """By role, as templates name them. A token is stored as text or as an object with `content`."""
    stored = {role: config.get(role) for role in _ROLES}
    texts = {
        role: token.get("content") if isinstance(token, dict) else token for role, token in stored.items()
    }
    return {role: text for role, text in texts.items() if isinstance(text, str)}


def _bos_that_is_added(tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> bytes | None:
    """The packed id that the tokenizer puts before every text, if it is the model's BOS."""
    bos_id: int | None = tokenizer.token_to_id(special_tokens.get("bos_token", ""))
    added: list[int] = tokenizer.encode("", add_special_tokens=True).ids
    return pack_ids([bos_id]) if bos_id is not None and added[:1] == [bos_id] else None
