"""The token cache: the same ids as tokenizing whole, within its memory, and only where that can be proved."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from dynrt.runtime.messages import unpack_ids
from dynrt.runtime.token_cache import LEAST_CHARS, TokenCache, cutter

CONTROL = ("<|a|>", "<|a|>x", "<|b|>", "[B]")  # one begins another
CORPUS = ["the cat sat on the mat  and then\n\nsat again", "1234 5678 émile 猫 <| tail |>"] * 20
TEXT = st.text(alphabet="the cat \n\t12é猫<|ab>x[B]", max_size=40)
PART = st.one_of(TEXT, st.sampled_from(CONTROL), TEXT.map(lambda text: (text + "c ") * 150))


def byte_level(
    added: tuple[str, ...] = CONTROL, *, prefix_space: bool = False, rstrip: bool = False
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, rstrip=rstrip) for token in added])
    tokenizer.add_tokens(["cat sat"])  # found in normalized text, within a stretch
    return tokenizer


TOKENIZERS = [byte_level(), byte_level(prefix_space=True)]


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def caching(tokenizer: Tokenizer, limit_bytes: int = 1 << 20) -> tuple[TokenCache, list[str]]:
    """The cache, and what it had tokenized."""
    tokenized: list[str] = []

    def tokenize(text: str) -> list[int]:
        tokenized.append(text)
        return whole(tokenizer, text)

    return TokenCache(tokenize, cutter(tokenizer), limit_bytes), tokenized


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(prompts=st.lists(st.lists(PART, max_size=8).map("".join), max_size=4))
def test_ids_are_those_of_the_whole_text(tokenizer: Tokenizer, prompts: list[str]) -> None:
    cache, _ = caching(tokenizer, limit_bytes=4_000)
    for prompt in [*prompts, *prompts]:
        assert unpack_ids(cache.ids(prompt)) == whole(tokenizer, prompt)
        assert cache.num_bytes <= 4_000


def test_a_system_prompt_is_tokenized_once() -> None:
    cache, tokenized = caching(TOKENIZERS[0])
    system = "the cat sat on the mat " * 40
    for user in ("first", "second"):
        prompt = f"{system}<|b|>{user}"
        assert unpack_ids(cache.ids(prompt)) == whole(TOKENIZERS[0], prompt)
    assert tokenized == [system, "<|b|>", "first", "second"]


def test_short_stretches_are_remembered_and_what_users_write_is_not() -> None:
    cache, tokenized = caching(TOKENIZERS[0])
    for user in ("the cat sat on the mat and sat", "the mat sat on the cat and sat"):
        prompt = f"sat<|b|>{user}<|a|>cat"
        assert unpack_ids(cache.ids(prompt)) == whole(TOKENIZERS[0], prompt)
    assert tokenized == ["sat", "<|b|>", "the cat sat on the mat and sat", "<|a|>", "cat", user]


def test_the_least_recently_used_goes_first() -> None:
    a, b, c = (f"{name} cat sat" * LEAST_CHARS for name in "abc")
    cache, tokenized = caching(TOKENIZERS[0])
    cache.ids(a)
    room_for_two = 2 * cache.num_bytes + 100
    cache, tokenized = caching(TOKENIZERS[0], room_for_two)
    for text in (a, b, a, c, a, b):
        cache.ids(text)
    assert tokenized == [a, b, c, b]
    cache, tokenized = caching(TOKENIZERS[0], limit_bytes=100)
    cache.ids(a)
    assert cache.num_bytes == 0, "what is larger than the cache does not empty it"


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([("a", -1.0)], unk_id=0))
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


def metaspace() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return tokenizer


@pytest.mark.parametrize("tokenizer", [unigram(), metaspace(), byte_level(rstrip=True), byte_level(added=())])
def test_other_tokenizers_are_not_cut(tokenizer: Tokenizer) -> None:
    assert cutter(tokenizer) is None
    cache, _ = caching(tokenizer)
    text = "<|b|> the cat" * 100
    assert unpack_ids(cache.ids(text)) == whole(tokenizer, text)
    assert cache.num_bytes == 0
