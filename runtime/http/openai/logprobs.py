"""Log probabilities in the shapes of the endpoints: chat's, text completions', and vLLM's of the prompt."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from dynrt.engines.token_bytes import TokenBytes
from dynrt.runtime.errors import EngineError
from dynrt.runtime.http.openai import types as openai
from dynrt.runtime.messages import TokenLogprob

LEAST_LOGPROB = -9999.0  # for tokens that cannot be: JSON has no infinity
_utf8_decoder = codecs.getincrementaldecoder("utf-8")


def token_name(vocabulary: TokenBytes, token_id: int) -> str:
    """Its text; the name of a special token; `bytes:\\xe2\\x80` for one that is not whole characters."""
    special = vocabulary.special_tokens.get(token_id)
    if special is not None:
        return special
    spelled = vocabulary[token_id]
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


Scored = tuple[int, TokenLogprob | None]  # a token and its log probability; the first of a prompt has none


def scored(token_ids: Sequence[int], entries: Sequence[TokenLogprob | None] | None) -> zip[Scored]:
    """Each token with its entry. EngineError if the engine left some out: a client would misread the rest."""
    found = 0 if entries is None else len(entries)
    if found != len(token_ids):
        raise EngineError(f"the engine gave {found} log probabilities for {len(token_ids)} tokens")
    return zip(token_ids, entries or (), strict=True)


def chat_logprobs(
    vocabulary: TokenBytes, token_ids: Sequence[int], entries: Sequence[TokenLogprob] | None, top: int
) -> openai.ChatLogprobs:
    """`bytes` are those of the text: special tokens have none."""
    return openai.ChatLogprobs(
        [_chat_entry(vocabulary, entry, top) for _, entry in scored(token_ids, entries) if entry is not None]
    )


def _chat_entry(vocabulary: TokenBytes, entry: TokenLogprob, top: int) -> openai.ChatLogprob:
    return openai.ChatLogprob(
        token_name(vocabulary, entry.token_id),
        finite(entry.logprob),
        [*vocabulary[entry.token_id]],
        [
            openai.TopLogprob(token_name(vocabulary, token_id), finite(logprob), [*vocabulary[token_id]])
            for token_id, logprob in entry.top[:top]
        ],
    )


def text_logprobs(
    vocabulary: TokenBytes, entries: Sequence[Scored], top: int, cursor: TextCursor
) -> openai.TextLogprobs:
    return openai.TextLogprobs(
        tokens=[token_name(vocabulary, token_id) for token_id, _ in entries],
        token_logprobs=[None if entry is None else finite(entry.logprob) for _, entry in entries],
        top_logprobs=[None if entry is None else _by_name(vocabulary, entry, top) for _, entry in entries],
        text_offset=[cursor.advance(token_id) for token_id, _ in entries],
    )


def _by_name(vocabulary: TokenBytes, entry: TokenLogprob, top: int) -> dict[str, float]:
    """The `top` likeliest tokens, and the one that is there in any case. Of equal names, the likeliest's counts."""
    named: dict[str, float] = {}
    for token_id, logprob in (*entry.top[:top], (entry.token_id, entry.logprob)):
        named.setdefault(token_name(vocabulary, token_id), finite(logprob))
    return named


def prompt_logprobs(
    vocabulary: TokenBytes, token_ids: Sequence[int], entries: Sequence[TokenLogprob | None] | None, top: int
) -> openai.PromptLogprobs:
    """By token id, as vLLM tells them. The rank of a token is known if it is among those asked for."""
    return [
        None if entry is None else _by_id(vocabulary, entry, top) for _, entry in scored(token_ids, entries)
    ]


def _by_id(vocabulary: TokenBytes, entry: TokenLogprob, top: int) -> dict[str, openai.PromptLogprob]:
    told = {
        str(token_id): openai.PromptLogprob(finite(logprob), rank, token_name(vocabulary, token_id))
        for rank, (token_id, logprob) in enumerate(entry.top[:top], start=1)
    }
    own = openai.PromptLogprob(finite(entry.logprob), None, token_name(vocabulary, entry.token_id))
    told.setdefault(str(entry.token_id), own)
    return told


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


class TextCursor:
    """Where the next token begins in a choice's text, in characters.

    `before`: the tokens before that text, or the last of them. `text`: what the text is known to begin with, in
    which special tokens may be written.
    """

    def __init__(self, vocabulary: TokenBytes, before: Sequence[int] = (), text: str = "") -> None:
        self._vocabulary = vocabulary
        self._text = text
        self._at = 0
        self._drops_space = vocabulary.drops_first_space and not any(vocabulary[one] for one in before)
        self._utf8 = _utf8_decoder("replace")
        self._utf8.decode(b"".join([vocabulary[one] for one in before]))  # it may end inside a character

    def advance(self, token_id: int) -> int:
        """Where `token_id` begins."""
        begins_at = self._at
        special = self._vocabulary.special_tokens.get(token_id)
        if special is not None:
            self._at += len(special) if self._text.startswith(special, begins_at) else 0
            return begins_at
        spelled = self._vocabulary[token_id]
        if spelled and self._drops_space:
            self._drops_space = False
            spelled = spelled.removeprefix(b" ")
        self._at += len(self._utf8.decode(spelled))
        return begins_at
