"""Reasoning told from answers: formats, prompts that open or forbid it, and that the size of pieces does not matter."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynrt.runtime.http.answers.reasoning.formats import REASONING_FORMATS, reasoning_format_of
from dynrt.runtime.http.answers.reasoning.parser import Answer, ReasoningParser, Thought

QWEN3 = REASONING_FORMATS["qwen3"]
R1 = REASONING_FORMATS["deepseek_r1"]


def split(parser: ReasoningParser, pieces: Iterable[str]) -> tuple[str, str]:
    """What was thought and what was answered, joined; all reasoning comes ahead of all answer."""
    told = [one for piece in pieces for one in parser.feed(piece)] + parser.finish()
    kinds = [type(one) for one in told]
    assert kinds == sorted(kinds, key=lambda kind: kind is Answer)
    return (
        "".join(one.text for one in told if isinstance(one, Thought)),
        "".join(one.text for one in told if isinstance(one, Answer)),
    )


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_each_format(name: str) -> None:
    form = REASONING_FORMATS[name]
    text = f"\n{form.opening}\nHm. 🦜\n\nYes.\n{form.closing}\n\nIt is {form.opening} so.\n"
    expected = ("Hm. 🦜\n\nYes.", f"It is {form.opening} so.\n")
    assert split(form.parser("user: hi\nassistant: "), [text]) == expected
    assert split(form.parser("user: hi\nassistant: "), text) == expected


def test_without_reasoning_all_is_answer() -> None:
    assert split(QWEN3.parser(""), " It </think> is <think> so ") == ("", " It </think> is <think> so ")
    assert split(QWEN3.parser(""), "<thin") == ("", "<thin")
    assert split(QWEN3.parser(""), "") == ("", "")


def test_the_prompt_may_open_the_reasoning() -> None:
    assert split(QWEN3.parser("assistant\n<think>\n"), "Hm.</think>Yes") == ("Hm.", "Yes")
    assert split(QWEN3.parser("assistant\n<think>\n"), "<think>Hm.</think>Yes") == ("Hm.", "Yes")


def test_the_prompt_may_forbid_the_reasoning() -> None:
    forbidding = "assistant\n<think>\n\n</think>\n\n"
    assert split(QWEN3.parser(forbidding), "Yes") == ("", "Yes")
    assert split(R1.parser(forbidding), "Yes") == ("", "Yes")


def test_a_model_may_reason_without_an_opening_tag() -> None:
    assert split(R1.parser("assistant: "), "Hm.\n</think>\n\nYes") == ("Hm.", "Yes")


def test_reasoning_that_is_cut_off_has_no_answer() -> None:
    assert split(QWEN3.parser(""), "<think>Hm. </thi") == ("Hm. </thi", "")


def test_reasoning_is_told_as_it_comes() -> None:
    parser = QWEN3.parser("<think>")
    assert parser.feed("Let me") == [Thought("Let me")]
    assert parser.feed(" see\n</") == [Thought(" see")]
    assert parser.feed("b>") == [Thought("\n</b>")]
    assert parser.feed("\n</think>\n\nSo") == [Answer("So")]
    assert parser.feed(" be it ") == [Answer(" be it ")]


fragments = st.sampled_from(["<think>", "</think>", "<th", "</", "ink>", "a", " ", "\n", "🦜"])


@given(st.lists(fragments, max_size=12), st.booleans(), st.data())
def test_pieces_do_not_matter(parts: list[str], is_open: bool, data: st.DataObject) -> None:
    text = "".join(parts)
    prompt = "<think>" if is_open else ""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = split(QWEN3.parser(prompt), [text])
    assert split(QWEN3.parser(prompt), text) == whole
    assert split(QWEN3.parser(prompt), pieces) == whole
    shown = "".join(whole).translate({ord(" "): None, ord("\n"): None})
    assert len(shown) >= len(
        text.replace("<think>", "").replace("</think>", "").replace(" ", "").replace("\n", "")
    )


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}", "qwen3"),
        ("{% set content = content.split('</think>')[-1] %}<｜Assistant｜>", "qwen3"),
        ("[THINK]{{ thinking }}[/THINK]", "mistral"),
        ("{{ '<seed:think>' }}{{ '</seed:think>' }}", "seed_oss"),
        ("{{ messages }}", None),
    ],
)
def test_formats_are_told_by_the_template(template: str, name: str | None) -> None:
    assert reasoning_format_of(template) == name
