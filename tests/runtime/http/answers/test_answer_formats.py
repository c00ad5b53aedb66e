"""The formats in which answers are read: told by the template, by a flag, or not at all; names as in the help."""

from __future__ import annotations

import pytest
from scripted_backend import ScriptedBackend

from dynrt.runtime import cli
from dynrt.runtime.errors import ConfigError
from dynrt.runtime.http.answers.formats import AnswerFormats
from dynrt.runtime.http.answers.reasoning.formats import REASONING_FORMATS
from dynrt.runtime.http.answers.tools.formats import TOOL_FORMATS
from dynrt.runtime.http.options import EndpointOptions
from dynrt.runtime.http.transport.server import HttpServer
from dynrt.runtime.serve import endpoint_options

QWEN3 = "<tool_call>{{ call | tojson }}</tool_call><think>\n\n</think>"


def test_told_by_the_template() -> None:
    formats = AnswerFormats()
    assert formats.of_tools(QWEN3) is TOOL_FORMATS["hermes"]
    assert formats.of_reasoning(QWEN3) is REASONING_FORMATS["qwen3"]
    assert formats.of_tools("") is None and formats.of_reasoning("") is None


def test_told_by_a_flag() -> None:
    formats = AnswerFormats("mistral", "deepseek_r1")
    assert formats.of_tools(QWEN3) is TOOL_FORMATS["mistral"]
    assert formats.of_reasoning("") is REASONING_FORMATS["deepseek_r1"]


def test_none() -> None:
    formats = AnswerFormats("none", "none")
    formats.check()
    assert formats.of_tools(QWEN3) is None and formats.of_reasoning(QWEN3) is None


@pytest.mark.parametrize(
    "formats", [AnswerFormats(tool_parser="qwen9"), AnswerFormats(reasoning_parser="qwen9")]
)
def test_an_unknown_name_is_refused_at_the_start(formats: AnswerFormats) -> None:
    with pytest.raises(ConfigError, match=r"parser is qwen9; it can be .*mistral.* or none"):
        HttpServer(ScriptedBackend(), EndpointOptions(answer_formats=formats))


def test_flags_reach_the_endpoint_and_the_help_names_what_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = cli._parser().parse_args(["serve", "--tool-parser", "hermes", "--reasoning-parser", "none"])
    assert endpoint_options(arguments, {}).answer_formats == AnswerFormats("hermes", "none")
    with pytest.raises(SystemExit):
        cli._parser().parse_args(["serve", "--help"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in [*TOOL_FORMATS, *REASONING_FORMATS])
