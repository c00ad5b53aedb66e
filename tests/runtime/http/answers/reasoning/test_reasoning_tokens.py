"""How many tokens were reasoning: by the tags, whichever tokens spell them, and however the tokens come."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynrt.runtime.http.answers.reasoning.formats import REASONING_FORMATS
from dynrt.runtime.http.answers.reasoning.tokens import ReasoningTokens

END, OPENING, CLOSING = 900, 901, 902


class Words(dict[int, bytes]):
    """Token number i spells words[i]; three more are special."""

    special_tokens: ClassVar = {END: "<|end|>", OPENING: "<think>", CLOSING: "</think>"}
    drops_first_space = False

    def __init__(self, words: list[str]) -> None:
        super().__init__(enumerate(word.encode() for word in words))

    def __missing__(self, token_id: int) -> bytes:
        assert token_id in self.special_tokens
        return b""


def counter(words: list[str], prompt_end: str = "", form: str = "qwen3") -> ReasoningTokens:
    return REASONING_FORMATS[form].token_counter(prompt_end, Words(words))  # type: ignore[arg-type]


def count(*words: str, prompt_end: str = "", form: str = "qwen3") -> int:
    """Of an answer whose tokens spell these words."""
    tokens = counter(list(words), prompt_end, form)
    tokens.add(range(len(words)))
    return tokens.count


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["<think>", "\n", "Hm", ".", "\n", "</think>", "\n\n", "Yes"], 4),
        (["\n", "<", "think", ">", "Hm", "</", "think", ">", "Yes", "</think>"], 1),
        (["<think>Hm", ". So", ".</think>Yes", "."], 3),
        (["<thi", "nk>H", "m</th", "ink>Y"], 2),
        (["<think>", "</think>", "Yes"], 0),
        (["<think>", "Hm", ",", " "], 3),
        (["Yes", "<think>", "Hm", "</think>"], 0),
        (["<think>", "🦜", "</b>", "</think>"], 2),
        ([], 0),
    ],
)
def test_tokens_between_the_tags(words: list[str], expected: int) -> None:
    assert count(*words) == expected


def test_tags_that_are_special_tokens() -> None:
    tokens = counter(["Hm", ".", "Yes"])
    tokens.add([OPENING, 0, 1, CLOSING, 2, END])
    assert tokens.count == 2


def test_an_end_inside_of_the_reasoning_is_none_of_it() -> None:
    tokens = counter(["Hm", "."])
    tokens.add([OPENING, 0, 1, END])
    assert tokens.count == 2


def test_the_prompt_or_the_model_may_have_opened_it() -> None:
    assert count("Hm", ".", "</think>", "Yes", prompt_end="<think>\n") == 2
    assert count("<think>", "Hm", "</think>", "Yes", prompt_end="<think>\n") == 1
    assert count("Hm", ".", "</think>", "Yes", form="deepseek_r1") == 2
    assert count("<", prompt_end="<think>") == 1, "as its text is reasoning too"
    assert count("Yes", prompt_end="<think>\n\n</think>\n\n", form="deepseek_r1") == 0


words = st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "a", "b</think>c", " ", "\n", "🦜"])


@given(st.lists(words, max_size=14), st.booleans(), st.data())
def test_how_the_tokens_come_does_not_matter(parts: list[str], is_open: bool, data: st.DataObject) -> None:
    prompt_end = "<think>" if is_open else ""
    whole, in_pieces = counter(parts, prompt_end), counter(parts, prompt_end)
    whole.add(range(len(parts)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(parts)), max_size=5)))
    for start, end in zip([0, *cuts], [*cuts, len(parts)], strict=True):
        in_pieces.add(range(start, end))
    assert in_pieces.count == whole.count == expected_count("".join(parts), parts, is_open)


def expected_count(text: str, parts: list[str], is_open: bool) -> int:
    """By looking at each token's place in the text."""
    stripped = text.lstrip()
    lead = len(text) - len(stripped)
    if stripped.startswith("<think>"):
        start = lead + len("<think>")
    elif is_open:
        start = 0
    else:
        return 0
    end = text.find("</think>", start)
    reasoning = range(start, len(text) if end < 0 else end)
    place, num_tokens = 0, 0
    for part in parts:
        num_tokens += any(position in reasoning for position in range(place, place + len(part)))
        place += len(part)
    return num_tokens
