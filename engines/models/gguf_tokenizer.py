"""tokenizer.json and its companions from the metadata of a GGUF file (byte-level BPE vocabularies)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from dynrt.engines.models.gguf_file import GgufFile

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_SPECIAL_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# GPT-4's pattern with digits in runs of {digits}, as Llama 3 and Qwen 2 publish it in their tokenizer.json.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What llama.cpp splits by when a file says "default", one after the other.
_DEFAULT = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


class _Pre(msgspec.Struct, frozen=True):
    """How text is cut before BPE, by the name that the file gives it in tokenizer.ggml.pre."""

    splitter: Callable[[], Any]
    normalizer: Callable[[], Any] | None = None
    ignore_merges: bool = False  # a word that is in the vocabulary is taken whole
    add_bos: bool = False  # if the file does not say


def _split(*patterns: str) -> Any:
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, _byte_level(use_regex=False)])


def _byte_level(*, use_regex: bool) -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)


def _smollm() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), _byte_level(use_regex=True)]
    )


_LLAMA3 = _Pre(lambda: _split(_CL100K.format(digits="{1,3}")), ignore_merges=True, add_bos=True)
_PRE_TOKENIZERS = {
    "default": _Pre(lambda: _split(*_DEFAULT)),
    "gpt-2": _Pre(lambda: _byte_level(use_regex=True)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Pre(lambda: _split(_CL100K.format(digits="")), normalizer=normalizers.NFC),
    "smollm": _Pre(_smollm),
}


def build_tokenizer(gguf: GgufFile) -> Tokenizer:
    """ModelLoadError if the file's kind of vocabulary or its pre-tokenizer is not known exactly."""
    pre = _pre_tokenizer(gguf)
    tokens = gguf.require("tokenizer.ggml.tokens", list)
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise gguf.error(f"has {len(tokens) - len(vocab)} tokens twice in its vocabulary")
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.require("tokenizer.ggml.merges", list)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=pre.ignore_merges))
    if pre.normalizer is not None:
        tokenizer.normalizer = pre.normalizer()
    tokenizer.pre_tokenizer = pre.splitter()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(gguf, tokenizer, tokens)
    if _adds_bos(gguf, pre):
        bos = _special_tokens(gguf, tokens)["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocab[bos])]
        )
    return tokenizer


def tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    """What goes into tokenizer_config.json; the chat template has a file of its own."""
    tokens = gguf.require("tokenizer.ggml.tokens", list)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf.hyper("context_length", int),
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_bos(gguf, _pre_tokenizer(gguf)),
        **_special_tokens(gguf, tokens),
    }


def chat_template(gguf: GgufFile) -> str | None:
    return gguf.get("tokenizer.chat_template", str, "") or None


def _pre_tokenizer(gguf: GgufFile) -> _Pre:
    kind = gguf.require("tokenizer.ggml.model", str)
    if kind != "gpt2":
        family = "a SentencePiece" if kind == "llama" else f"a {kind!r}"
        raise gguf.error(
            f"has {family} vocabulary, only byte-level BPE is read; use the Hugging Face directory"
        )
    name = gguf.require("tokenizer.ggml.pre", str)
    if name not in _PRE_TOKENIZERS:
        raise gguf.error(
            f"names the pre-tokenizer {name!r}, which is not known here (known: {', '.join(_PRE_TOKENIZERS)}); "
            "use the Hugging Face directory"
        )
    return _PRE_TOKENIZERS[name]


def _add_tokens(gguf: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    kinds = gguf.require("tokenizer.ggml.token_type", list)
    for token, kind in zip(tokens, kinds, strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])


def _adds_bos(gguf: GgufFile, pre: _Pre) -> bool:
    return gguf.get("tokenizer.ggml.add_bos_token", bool, pre.add_bos)


def _special_tokens(gguf: GgufFile, tokens: list[str]) -> dict[str, str]:
    ids = {role: gguf.get(f"tokenizer.ggml.{key}_token_id", int, -1) for role, key in _SPECIAL_ROLES.items()}
    for role, token_id in ids.items():
        if token_id >= len(tokens):
            raise gguf.error(f"has token id {token_id} as {role}, but only {len(tokens)} tokens")
    return {role: tokens[token_id] for role, token_id in ids.items() if token_id >= 0}
