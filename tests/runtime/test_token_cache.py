"""The token cache: the same ids as tokenizing whole, within its memory, and only where that can be proved."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from dynrt.runtime.messages import unpack_ids
from dynrt.runtime.token_cache import LEAST_CHARS, MOST_NEW_WORDS, MOST_WORD_CHARS, TokenCache
from dynrt.runtime.token_cuts import Cuts, cuts_of

CONTROL = ("<|a|>", "<|a|>x", "<|b|>", "[B]")  # one begins another
CORPUS = ["the cat sat on the mat  and then\n\nsat again", "1234 5678 émile 猫 <| tail |>"] * 20
TEXT = st.text(alphabet="the cat \n\t12é猫<|ab>x[B]", max_size=40)
PART = st.one_of(TEXT, st.sampled_from(CONTROL), TEXT.map(lambda text: (text + "c ") * 150))
ASCII = st.text(alphabet="ab T'slve(.<5\t\n\r\x0b\x1c\x00", max_size=40)

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace("{1,3}", "")


def byte_level(
    added: tuple[str, ...] = CONTROL,
    *,
    prefix_space: bool = False,
    rstrip: bool = False,
    split: str = "",
    use_regex: bool = True,
    first_step: pre_tokenizers.PreTokenizer | None = None,
    words: tuple[str, ...] = (),
) -> Tokenizer:
    """`words`: added tokens that are found in normalized text, within a stretch."""
    tokenizer = Tokenizer(models.BPE())
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=use_regex and not split)
    steps = [pre_tokenizers.Split(Regex(split), "isolated")] if split else []
    steps = [*steps, bytes_of] if first_step is None else [first_step, *steps, bytes_of]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else bytes_of
    tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, rstrip=rstrip) for token in added])
    tokenizer.add_tokens([AddedToken(word, normalized=True) for word in words])
    return tokenizer


WITH_WORDS = {
    "gpt-2": byte_level(),
    "smollm2": byte_level(first_step=pre_tokenizers.Digits(individual_digits=True)),
    "llama-3": byte_level(split=LLAMA_3),
    "qwen-2": byte_level(split=QWEN_2),
}
WITHOUT_WORDS = {
    "added words": byte_level(words=("cat sat", "t<|")),
    "no words": byte_level(use_regex=False),
    "prefix space": byte_level(prefix_space=True),
    "other words": byte_level(split=r"\s\w\s|.", use_regex=True),
}
WORDS, STRETCHES = WITH_WORDS["gpt-2"], WITHOUT_WORDS["added words"]


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def caching(tokenizer: Tokenizer, limit_bytes: int = 1 << 20) -> tuple[TokenCache, list[str]]:
    """The cache, and what it had tokenized."""
    tokenized: list[str] = []

    def tokenize(text: str) -> list[int]:
        tokenized.append(text)
        return whole(tokenizer, text)

    return TokenCache(tokenize, cuts_of(tokenizer), limit_bytes), tokenized


@pytest.mark.parametrize("tokenizer", WITH_WORDS.values(), ids=WITH_WORDS)
@settings(max_examples=500)
@given(text=st.one_of(ASCII, ASCII.map(lambda text: "it's a b.\n ab" + text)))
def test_words_are_tokenized_alone_as_within_their_text(tokenizer: Tokenizer, text: str) -> None:
    cut = cuts_of(tokenizer).between_words
    assert cut is not None
    words = cut(text)
    assert "".join(words) == text
    assert [token_id for word in words for token_id in whole(tokenizer, word)] == whole(tokenizer, text)


@pytest.mark.parametrize("tokenizer", WITHOUT_WORDS.values(), ids=WITHOUT_WORDS)
def test_where_words_might_go_together_none_is_cut_off(tokenizer: Tokenizer) -> None:
    cuts = cuts_of(tokenizer)
    assert cuts.at_control_tokens is not None and cuts.between_words is None


@pytest.mark.parametrize(
    ("normalizer", "keeps_words"),
    [
        (normalizers.Lowercase(), False),
        (normalizers.Replace(" ", "_"), False),
        (normalizers.Strip(), False),
        (normalizers.Replace("\ufdd0", "<"), True),
        (normalizers.NFKC(), True),
    ],
)
def test_normalizers_that_change_ascii_text(normalizer: normalizers.Normalizer, keeps_words: bool) -> None:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizer])
    assert (cuts_of(tokenizer).between_words is not None) == keeps_words


def test_a_word_is_tokenized_once() -> None:
    cache, tokenized = caching(WORDS)
    for text in ("the cat sat on the mat and sat", "on the mat sat the cat and sat"):
        assert unpack_ids(cache.ids(text)) == whole(WORDS, text)
    assert tokenized == ["the", " cat", " sat", " on", " the", " mat", " and", "on"]


def test_a_text_of_many_new_words_is_tokenized_whole() -> None:
    cache, tokenized = caching(WORDS)
    text = " ".join(f"word{chr(97 + n)}" for n in range(MOST_NEW_WORDS + 2))
    assert unpack_ids(cache.ids(text)) == whole(WORDS, text)
    assert len(tokenized) == MOST_NEW_WORDS + 1 and tokenized[-1] == text
    assert unpack_ids(cache.ids(f"{text}.")) == whole(WORDS, f"{text}.")
    assert len(tokenized) == MOST_NEW_WORDS + 1 + 3, "the two that were left, and the full stop"


def test_long_words_are_not_kept() -> None:
    cache, tokenized = caching(WORDS)
    text = "sat " + "x" * MOST_WORD_CHARS
    for _ in range(2):
        assert unpack_ids(cache.ids(text)) == whole(WORDS, text)
    assert tokenized == ["sat", text[3:], text[3:]]


@pytest.mark.parametrize("tokenizer", [WORDS, STRETCHES, WITHOUT_WORDS["prefix space"]])
@given(prompts=st.lists(st.lists(PART, max_size=8).map("".join), max_size=4))
def test_ids_are_those_of_the_whole_text(tokenizer: Tokenizer, prompts: list[str]) -> None:
    cache, _ = caching(tokenizer, limit_bytes=4_000)
    for prompt in [*prompts, *prompts]:
        assert unpack_ids(cache.ids(prompt)) == whole(tokenizer, prompt)
        assert cache.num_bytes <= 4_000


def test_a_system_prompt_is_tokenized_once() -> None:
    cache, tokenized = caching(STRETCHES)
    system = "the cat sat on the mat " * 40
    for user in ("first", "second"):
        prompt = f"{system}<|b|>{user}"
        assert unpack_ids(cache.ids(prompt)) == whole(STRETCHES, prompt)
    assert tokenized == [system, "<|b|>", "first", "second"]


def test_short_stretches_are_remembered_and_what_users_write_is_not() -> None:
    cache, tokenized = caching(STRETCHES)
    for user in ("the cat sat on the mat and sat", "the mat sat on the cat and sat"):
        prompt = f"sat<|b|>{user}<|a|>cat"
        assert unpack_ids(cache.ids(prompt)) == whole(STRETCHES, prompt)
    assert tokenized == ["sat", "<|b|>", "the cat sat on the mat and sat", "<|a|>", "cat", user]


def test_the_least_recently_used_goes_first() -> None:
    a, b, c = (f"{name} cat sat" * LEAST_CHARS for name in "abc")
    cache, tokenized = caching(STRETCHES)
    cache.ids(a)
    room_for_two = 2 * cache.num_bytes + 100
    cache, tokenized = caching(STRETCHES, room_for_two)
    for text in (a, b, a, c, a, b):
        cache.ids(text)
    assert tokenized == [a, b, c, b]
    cache, tokenized = caching(STRETCHES, limit_bytes=100)
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


def without_pre_tokens() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = None
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [unigram(), metaspace(), without_pre_tokens(), byte_level(rstrip=True), byte_level(added=())],
)
def test_other_tokenizers_are_not_cut(tokenizer: Tokenizer) -> None:
    assert cuts_of(tokenizer) == Cuts()
    cache, _ = caching(tokenizer)
    text = "<|b|> the cat" * 100
    assert unpack_ids(cache.ids(text)) == whole(tokenizer, text)
    assert cache.num_bytes == 0
