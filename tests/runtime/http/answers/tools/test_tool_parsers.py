"""Parsers of tool calls: what is a call, what is text, and that the size of the pieces does not matter."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynrt.runtime.http.answers.tools.call_parser import CallParser
from dynrt.runtime.http.answers.tools.events import ArgumentsPiece, CallBegun, CallEnded, Text, ToolEvent
from dynrt.runtime.http.answers.tools.forced import ForcedCallParser, ForcedListParser
from dynrt.runtime.http.answers.tools.formats import TOOL_FORMATS, tool_format_of
from dynrt.runtime.http.answers.tools.hermes import HermesParser
from dynrt.runtime.http.answers.tools.llama import LlamaParser
from dynrt.runtime.http.answers.tools.mistral import MistralParser

TOOLS = ("get_weather", "add")
FORMATS = (HermesParser, LlamaParser, MistralParser)

Call = tuple[str, str]  # name, arguments


def merged(events: Iterable[ToolEvent]) -> list[ToolEvent]:
    """`events` with adjacent pieces of one thing joined."""
    joined: list[ToolEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + event.text)
        elif isinstance(event, ArgumentsPiece) and isinstance(last, ArgumentsPiece):
            joined[-1] = ArgumentsPiece(event.index, last.json + event.json)
        else:
            joined.append(event)
    return joined


def parsed(parser: CallParser, pieces: Iterable[str]) -> list[ToolEvent]:
    events = [event for piece in pieces for event in parser.feed(piece)]
    return merged([*events, *parser.finish()])


def call_events(*calls: Call) -> list[ToolEvent]:
    return [
        event
        for index, (name, arguments) in enumerate(calls)
        for event in (CallBegun(index, name), ArgumentsPiece(index, arguments), CallEnded(index))
    ]


def text_of(events: Iterable[ToolEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def hermes(calls: list[Call]) -> str:
    return "\n".join(
        f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
        for name, arguments in calls
    )


def llama(calls: list[Call]) -> str:
    return "<|python_tag|>" + "; ".join(
        f'{{"name": "{name}", "parameters": {arguments}}}' for name, arguments in calls
    )


def mistral(calls: list[Call]) -> str:
    listed = ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return f"[TOOL_CALLS][{listed}]"


def newer_mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}{arguments}" for name, arguments in calls)


def newest_mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4e[ARGS]{arguments}" for name, arguments in calls)


WRITTEN: list[tuple[type[CallParser], Callable[[list[Call]], str]]] = [
    (HermesParser, hermes),
    (LlamaParser, llama),
    (MistralParser, mistral),
    (MistralParser, newer_mistral),
    (MistralParser, newest_mistral),
]
written_so = pytest.mark.parametrize(
    ("parser", "write"), WRITTEN, ids=["hermes", "llama", "mistral", "newer mistral", "newest mistral"]
)
PARIS = ("get_weather", '{"city": "Paris", "days": [1, 2.5e3, null], "deep": {"x": {}}}')
SUM = ("add", '{"a":"\\"}]{[\\\\ 🦜 \\u00e9"}')


@written_so
@pytest.mark.parametrize("calls", [[PARIS], [PARIS, SUM, PARIS]], ids=["one", "three"])
def test_calls(parser: type[CallParser], write: Callable[[list[Call]], str], calls: list[Call]) -> None:
    assert parsed(parser(TOOLS), [write(calls)]) == call_events(*calls)
    assert parsed(parser(TOOLS), write(calls)) == call_events(*calls)


@written_so
def test_text_before_and_behind_calls(parser: type[CallParser], write: Callable[[list[Call]], str]) -> None:
    events = parsed(parser(TOOLS), f"Let me see. 🦜\n\n{write([PARIS, SUM])}\n Done")
    assert events == [Text("Let me see. 🦜"), *call_events(PARIS, SUM), Text("\n Done")]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(
    arguments=st.dictionaries(st.text(max_size=5), json_values, max_size=3),
    format_index=st.integers(0, len(WRITTEN) - 1),
    ascii_only=st.booleans(),
)
def test_any_arguments_come_through(
    arguments: dict[str, object], format_index: int, ascii_only: bool
) -> None:
    parser, write = WRITTEN[format_index]
    call = ("add", json.dumps(arguments, ensure_ascii=ascii_only))
    assert parsed(parser(TOOLS), write([call])) == call_events(call)


fragments = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "<tool", "<|python_tag|>", "<|py", "[TOOL_CALLS]", "[TOOL", "[CALL_ID]",
        '"name": ', '"get_weather"', '"other"', '"arguments": ', '"parameters": ', '"id": 1', "add", "other",
        "[ARGS]", "{", "}", "[", "]", ",", ";", ":", " ", "\n",
        '"', "\\", "\\u00", "1", "-", "tru", "true", "x", "é", "🦜",
        '{"name": "add", "arguments": {"a": ', '{"name": "add"', '{"arguments": {"a": 1}, "name": "add"}',
    ]
)  # fmt: skip


@settings(max_examples=200)
@given(st.lists(fragments, max_size=14), st.integers(0, 2), st.data())
def test_pieces_do_not_matter(parts: list[str], format_index: int, data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole = parsed(FORMATS[format_index](TOOLS), [text])
    assert parsed(FORMATS[format_index](TOOLS), text) == whole
    assert parsed(FORMATS[format_index](TOOLS), pieces) == whole


@settings(max_examples=200)
@given(st.lists(fragments, max_size=14), st.integers(0, 2))
def test_without_a_call_the_text_stays_as_it_is(parts: list[str], format_index: int) -> None:
    text = "".join(parts)
    events = parsed(FORMATS[format_index](TOOLS), text)
    begun = [event for event in events if isinstance(event, CallBegun)]
    assert len(begun) == len([event for event in events if isinstance(event, CallEnded)])
    if not begun:
        assert text_of(events) == text


@pytest.mark.parametrize("parser", FORMATS)
@pytest.mark.parametrize(
    "text",
    [
        "",
        " \n ",
        "Use <tool_call> tags, [TOOL_CALLS] or <|python_tag|>.",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '{"name": "unknown", "parameters": {}}',
        '[TOOL_CALLS]unknown{"a": 1}',
        '<tool_call>{"name": "add", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "add", "name": "add", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add"',
        '{"answer": 42}',
        '{"name": ["add"], "parameters": {}}',
        "[TOOL_CALLS][1, 2]",
        "[TOOL_CALLS][]",
        '<|python_tag|>brave_search.call(query="x")',
        "<tool_call>\n<function=add>\n</function>\n</tool_call>",
    ],
)
def test_what_only_looks_like_a_call_is_text(parser: type[CallParser], text: str) -> None:
    assert text_of(parsed(parser(TOOLS), text)) == text


def test_a_call_behind_one_that_is_none() -> None:
    text = f"<tool_call><tool_call>{hermes([PARIS]).removeprefix('<tool_call>')}"
    assert parsed(HermesParser(TOOLS), text) == [Text("<tool_call>"), *call_events(PARIS)]


def test_arguments_are_given_out_as_they_come() -> None:
    parser = HermesParser(TOOLS)
    assert parser.feed('<tool_call>{"name": "ad') == []
    assert parser.feed('d", "arguments": {"a') == [CallBegun(0, "add"), ArgumentsPiece(0, '{"a')]
    assert parser.feed('": 1') == [ArgumentsPiece(0, '": 1')]
    assert parser.feed("2}") == [ArgumentsPiece(0, "2}"), CallEnded(0)]
    assert parser.feed("}</tool_call>") == [] and parser.finish() == []


def test_text_is_given_out_as_it_comes() -> None:
    parser = MistralParser(TOOLS)
    assert parser.feed("It is 5") == [Text("It is 5")]
    assert parser.feed("[TO") == []
    assert parser.feed("DO] ") == [Text("[TODO]")]
    assert parser.feed("x[T") == [Text(" x")]
    assert parser.finish() == [Text("[T")]


def test_arguments_that_break_off_end_the_call() -> None:
    cut = parsed(LlamaParser(TOOLS), '{"name": "add", "parameters": {"a": [1, ')
    assert cut == [CallBegun(0, "add"), ArgumentsPiece(0, '{"a": [1, '), CallEnded(0)]
    broken = parsed(LlamaParser(TOOLS), '{"name": "add", "parameters": {"a": 1]} and so on')
    assert broken == [CallBegun(0, "add"), ArgumentsPiece(0, '{"a": 1'), CallEnded(0), Text("]} and so on")]


def test_arguments_ahead_of_the_name_and_none_at_all() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "type": "function", "name": "add"}</tool_call>'
    assert parsed(HermesParser(TOOLS), text) == call_events(("add", '{"a": 1}'))
    assert parsed(HermesParser(TOOLS), '<tool_call>{"name": "add"}</tool_call>') == call_events(("add", "{}"))


def test_a_forgotten_closing_tag_is_not_missed() -> None:
    text = hermes([SUM, PARIS]).replace("\n</tool_call>", "")
    assert parsed(HermesParser(TOOLS), text) == call_events(SUM, PARIS)


def test_deep_arguments_break_off() -> None:
    text = '{"name": "add", "parameters": {"a": ' + "[" * 100_000
    begun, arguments, ended, rest = parsed(LlamaParser(TOOLS), [text])
    assert (begun, ended) == (CallBegun(0, "add"), CallEnded(0))
    assert isinstance(arguments, ArgumentsPiece) and isinstance(rest, Text)
    assert text.endswith(arguments.json + rest.text)


def test_a_forced_list_of_calls() -> None:
    text = (
        f' [{{"name": "add", "arguments": {SUM[1]}}},\n{{"name": "get_weather", "arguments": {PARIS[1]}}}] '
    )
    assert parsed(ForcedListParser(TOOLS), text) == call_events(SUM, PARIS)


def test_a_forced_call_is_its_arguments() -> None:
    assert parsed(ForcedCallParser(["add"]), f" {SUM[1]}\n") == call_events(SUM)
    assert parsed(ForcedCallParser(["add"]), "no") == [Text("no")]


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n' }}{{ tool_call | tojson }}", "hermes"),
        ("<tool_call>\n<function={{ name }}>", None),
        ("{{ '[TOOL_CALLS][' }}<tool_call>", "mistral"),
        ("{%- if builtin_tools %}{{- '<|python_tag|>' }}", "llama3_json"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("{{ messages }}", None),
    ],
)
def test_formats_are_told_by_the_template(template: str, name: str | None) -> None:
    assert tool_format_of(template) == name


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_call_ids_differ(name: str) -> None:
    ids = {TOOL_FORMATS[name].new_call_id() for _ in range(100)}
    assert len(ids) == 100 and all(one.isascii() for one in ids)
