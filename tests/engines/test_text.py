"""Streamed text: whole characters, no piece of a stop string, and the same text however tokens are cut."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from dynrt.engines.stop_strings import StopFinder
from dynrt.engines.text import TextStream
from dynrt.engines.token_bytes import token_bytes
from dynrt.runtime.errors import ModelLoadError

_ALPHABET = pre_tokenizers.ByteLevel.alphabet()


@lru_cache
def byte_level() -> Tokenizer:
    """Ids: 0 <s>, 1 <|end|> (special), 2 <think> (not special), then 256 bytes in the order of `byte_id`."""
    tokens = ["<s>", "<|end|>", *sorted(_ALPHABET)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<think é>", normalized=False)])
    return tokenizer


S, END = 0, 1


def ids(text: str | bytes) -> list[int]:
    """One token per byte."""
    if isinstance(text, str):
        return byte_level().encode(text, add_special_tokens=False).ids
    return [_byte_ids()[byte] for byte in text]


@lru_cache
def _byte_ids() -> list[int]:
    spelled = {token_bytes(byte_level())[i]: i for i in range(byte_level().get_vocab_size())}
    return [spelled[bytes([byte])] for byte in range(256)]


@lru_cache
def sentencepiece(*, strips: bool = True) -> Tokenizer:
    """Words with ▁, and bytes as fallback, as in Llama 2."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁Hello",
        "▁",
        "▁world",
        "lo",
        "!",
    ]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def sp_ids(*words: str) -> list[int]:
    return [sentencepiece().token_to_id(word) for word in words]


def stream_text(stream: TextStream, pieces: list[list[int]]) -> str:
    return "".join(stream.push(piece).text for piece in pieces) + stream.finish()


def whole(
    output: list[int], *, prompt: list[int] | None = None, tokenizer: Tokenizer | None = None, **kwargs
) -> str:
    stream = TextStream.resume(tokenizer or byte_level(), prompt or [], [], 0, **kwargs)
    return stream_text(stream, [output])


# --- characters -----------------------------------------------------------------------------------


def test_a_character_that_only_the_prompt_began_is_not_the_outputs() -> None:
    began = ids("é".encode()[:1])
    assert whole([], prompt=began) == ""
    assert whole([END], prompt=began) == ""
    assert whole(ids(b"\xa9"), prompt=began) == "é"


def test_a_character_is_held_until_its_last_byte() -> None:
    stream = TextStream.resume(byte_level(), ids("Q: "), [], 0)
    assert [stream.push([i]).text for i in ids("a🦜é")] == ["a", "", "", "", "🦜", "", "é"]
    assert stream.finish() == ""


def test_bytes_that_can_no_longer_become_a_character_are_replaced_at_once() -> None:
    stream = TextStream.resume(byte_level(), [], [], 0)
    assert [stream.push([i]).text for i in ids(b"\xf0\x9fA")] == ["", "", "\ufffdA"]
    assert stream.push(ids(b"\xff")).text == "\ufffd"


def test_a_character_cut_off_by_the_end_becomes_one_replacement() -> None:
    assert whole(ids("ok🦜")[:-1]) == "ok\ufffd"


def test_a_prompt_that_ends_inside_a_character_is_neither_repeated_nor_lost() -> None:
    prompt = ids("Here: 🦜")[:-2]
    assert whole(ids("🦜!")[2:], prompt=prompt) == "🦜!"
    assert whole(ids("x"), prompt=prompt) == "\ufffdx"


def test_a_resumed_stream_remembers_the_beginning_of_a_character() -> None:
    output = ids("ab🦜")
    stream = TextStream.resume(byte_level(), ids("p"), output[:-1], 2)
    assert stream.push(output[-1:]).text == "🦜"


def test_special_tokens_and_ids_without_a_token_are_no_text() -> None:
    assert whole([S, *ids("a"), 99_999, *ids("b"), END]) == "ab"


def test_an_added_token_that_is_not_special_is_text() -> None:
    think = byte_level().token_to_id("<think é>")
    assert whole([*ids("a"), think, *ids("b")]) == "a<think é>b"


@given(st.binary(max_size=24), st.text(max_size=6))
@example(b"\xe4\xbd\xa0\xff\xf0\x9f", "")
def test_text_is_what_decoding_everything_at_once_gives(output: bytes, prompt: str) -> None:
    prompt_ids = ids(prompt)
    full = byte_level().decode(prompt_ids + ids(output))
    assert whole(ids(output), prompt=prompt_ids) == full[len(byte_level().decode(prompt_ids)) :]


# --- SentencePiece --------------------------------------------------------------------------------


@pytest.mark.parametrize("strips", [True, False])
@pytest.mark.parametrize(
    "prompt", [(), ("<s>",), ("<s>", "▁Hello"), ("▁",)], ids=["empty", "special only", "text", "a space"]
)
def test_leading_space_as_in_the_context_of_the_prompt(prompt: tuple[str, ...], strips: bool) -> None:
    tokenizer = sentencepiece(strips=strips)
    output = sp_ids("▁world", "lo", "▁Hello", "!")
    full = tokenizer.decode(sp_ids(*prompt) + output)
    expected = full[len(tokenizer.decode(sp_ids(*prompt))) :]
    assert whole(output, prompt=sp_ids(*prompt), tokenizer=tokenizer) == expected


def test_byte_fallback_completes_characters() -> None:
    stream = TextStream.resume(sentencepiece(), sp_ids("▁Hello"), [], 0)
    parrot = sp_ids("<0xF0>", "<0x9F>", "<0xA6>", "<0x9C>", "▁world")
    assert [stream.push([i]).text for i in parrot] == ["", "", "", "🦜", " world"]


def test_metaspace_decoder() -> None:
    tokenizer = Tokenizer(models.BPE({"▁a": 0, "b": 1}, []))
    tokenizer.decoder = decoders.Metaspace()
    assert whole([0, 1, 0], tokenizer=tokenizer) == tokenizer.decode([0, 1, 0]) == "ab a"
    assert whole([0, 1], prompt=[1], tokenizer=tokenizer) == " ab"


@pytest.mark.parametrize("decoder", [None, decoders.WordPiece(), decoders.Replace("_", " ")])
def test_a_decoder_of_another_family_is_refused(decoder: object) -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = decoder
    with pytest.raises(ModelLoadError, match="decoder"):
        TextStream.resume(tokenizer, [], [], 0)


# --- stop strings ---------------------------------------------------------------------------------


def test_the_beginning_of_a_stop_string_is_held_and_then_dropped() -> None:
    stream = TextStream.resume(byte_level(), [], [], 0, stop=["STOP"])
    assert [stream.push([i]).text for i in ids("a STO")] == ["a", " ", "", "", ""]
    last = stream.push(ids("Pmore"))
    assert (last.text, last.stopped) == ("", "STOP")
    assert stream.finish() == "" and stream.push(ids("x")).text == ""


def test_text_that_only_looked_like_a_stop_string_is_delivered() -> None:
    assert whole(ids("a STOa STO"), stop=["STOP"]) == "a STOa STO"


def test_a_stop_string_that_overlaps_itself() -> None:
    stream = TextStream.resume(byte_level(), [], [], 0, stop=["aab"])
    assert "".join(stream.push([i]).text for i in ids("aaaab!")) == "aa"
    assert stream.stopped == "aab"


def test_the_stop_string_that_is_complete_first_wins_and_of_two_the_longer() -> None:
    stream = TextStream.resume(byte_level(), [], [], 0, stop=["bcd", "c", "bc"])
    piece = stream.push(ids("abcd"))
    assert (piece.text, piece.stopped) == ("a", "bc")


def test_include_stop_shows_the_stop_string_once() -> None:
    assert whole(ids("a STOP b"), stop=["STOP"], include_stop=True) == "a STOP"


def test_a_stop_string_inside_one_token_ends_the_text_there() -> None:
    think = byte_level().token_to_id("<think é>")
    assert whole([*ids("a"), think, *ids("b")], stop=["ink"]) == "a<th"


def test_a_stop_string_that_is_a_special_token_stops() -> None:
    stream = TextStream.resume(byte_level(), [], [], 0, stop=["<|end|>"])
    piece = stream.push([*ids("ok"), S, END, *ids("more")])
    assert (piece.text, piece.stopped) == ("ok", "<|end|>")
    assert whole([*ids("ok"), END], stop=["<|end|>"], include_stop=True) == "ok<|end|>"


def test_special_tokens_that_are_to_be_shown_are_text() -> None:
    stream = TextStream.resume(byte_level(), [], [], 0, shown_special_tokens=["<|end|>"])
    assert stream.push([*ids("ok"), S, END, *ids("more")]).text == "ok<|end|>more"


def test_the_first_min_tokens_are_not_searched() -> None:
    stream = TextStream.resume(byte_level(), [], [], 0, stop=["a"], min_tokens=3)
    piece = stream.push(ids("aaabab"))
    assert (piece.text, piece.stopped) == ("aaab", "a")


def test_a_stop_string_does_not_begin_inside_min_tokens() -> None:
    assert whole(ids("abab!"), stop=["ab"], min_tokens=1) == "ab"
    assert whole(ids("ab!"), stop=["ab"], min_tokens=1) == "ab!"


def test_text_ready_but_not_sent_comes_with_the_next_push() -> None:
    stream = TextStream.resume(byte_level(), [], ids("abcd"), 2)
    assert stream.push([]).text == "cd"


def test_a_long_stop_string_costs_no_more_per_character() -> None:
    finder = StopFinder(["a" * 5000 + "b"])
    assert finder.feed("a" * 20_000) is None  # quadratic work would run into the test's time limit
    assert finder.held_chars == 5000
    assert finder.feed("b") == (1, "a" * 5000 + "b")


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=5), max_size=3))
def test_finder_against_a_search_of_every_prefix(text: str, stops: list[str]) -> None:
    finder = StopFinder(stops)
    found = finder.feed(text)
    ends = [(end, stop) for end in range(1, len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    expected = min(ends, key=lambda match: (match[0], -len(match[1])), default=None)
    assert found == expected
    if found is None:
        beginnings = [stop[:n] for stop in stops for n in range(1, len(stop))]
        assert finder.held_chars == max((len(b) for b in beginnings if text.endswith(b)), default=0)


# --- however the tokens are cut -------------------------------------------------------------------

_outputs = st.lists(
    st.sampled_from([*ids("ab🦜"), *ids(b"\xff\xe2"), S, END, byte_level().token_to_id("<think é>")]),
    max_size=24,
)
_stops = st.lists(st.sampled_from(["ab", "aab", "b🦜", "é>a", "<|end|>", "🦜🦜", "a" * 6]), max_size=3)


@given(
    _outputs,
    _stops,
    st.booleans(),
    st.integers(0, 6),
    st.lists(st.integers(0, 24), max_size=6),
    st.sampled_from([[], ids("p"), ids("🦜")[:2]]),
)
def test_any_cut_and_any_resume_give_the_same_text(
    output: list[int], stops: list[str], include: bool, min_tokens: int, cuts: list[int], prompt: list[int]
) -> None:
    settings = {"stop": stops, "include_stop": include, "min_tokens": min_tokens}
    reference = TextStream.resume(byte_level(), prompt, [], 0, **settings)
    expected = stream_text(reference, [output])
    edges = [0, *sorted(min(cut, len(output)) for cut in cuts), len(output)]
    pieces = [output[start:end] for start, end in pairwise(edges)]

    cut_up = TextStream.resume(byte_level(), prompt, [], 0, **settings)
    assert stream_text(cut_up, pieces) == expected
    assert cut_up.stopped == reference.stopped

    sent, done = "", 0
    for piece in pieces:  # a new worker for every piece
        stream = TextStream.resume(byte_level(), prompt, output[:done], len(sent), **settings)
        done += len(piece)
        sent += stream.push(piece).text
    assert sent + stream.finish() == expected
    assert stream.stopped == reference.stopped


@given(_outputs, st.lists(st.sampled_from(["ab", "aab", "🦜🦜"]), min_size=1, max_size=2))
def test_a_stop_string_never_shows_and_nothing_else_is_lost(output: list[int], stops: list[str]) -> None:
    stream = TextStream.resume(byte_level(), [], [], 0, stop=stops)
    text = stream_text(stream, [[i] for i in output])
    plain = whole(output)
    if stream.stopped is None:
        assert text == plain
    else:
        assert plain.startswith(text + stream.stopped)
    assert not any(stop in text for stop in stops)


@given(
    st.lists(
        st.sampled_from(["▁Hello", "▁", "▁world", "lo", "!", "<s>", "<0xF0>", "<0x9F>", "<0x21>"]),
        max_size=16,
    ),
    st.lists(st.sampled_from(["o!", " world", "!!", "\ufffd!"]), max_size=2),
    st.sampled_from([(), ("▁Hello",), ("<0xF0>",)]),
    st.booleans(),
)
def test_sentencepiece_streams_as_it_comes_whole(
    words: list[str], stops: list[str], prompt: tuple[str, ...], strips: bool
) -> None:
    tokenizer = sentencepiece(strips=strips)
    output = sp_ids(*words)
    streamed, at_once = (TextStream.resume(tokenizer, sp_ids(*prompt), [], 0, stop=stops) for _ in range(2))
    assert stream_text(streamed, [[i] for i in output]) == stream_text(at_once, [output])
    assert streamed.stopped == at_once.stopped
