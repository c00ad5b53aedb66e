"""The tools of a request: which are refused and under which name, and what a required call must look like."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dynrt.engines.native.grammar import check
from dynrt.runtime.errors import InvalidRequestError
from dynrt.runtime.http.answers.tools.request import (
    MAX_NAME_CHARS,
    MAX_TOOLS,
    TOOL_PARAMETERS,
    ToolUse,
    asked_tool_use,
    forced_calls,
)
from dynrt.runtime.http.parameters.fields import Fields, Problems
from dynrt.runtime.http.parameters.request_schema import ParameterSet

CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "$defs": {"City": {"type": "string"}},
}


def function(name: str = "add", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def read(**values: Any) -> ToolUse | None:
    fields = Fields(values, Problems())
    use = asked_tool_use(fields, ParameterSet(TOOL_PARAMETERS).read(fields))
    fields.problems.raise_if_any()
    return use


def test_no_tools() -> None:
    assert read() is None and read(tool_choice=None) is None
    assert read(tools=None, tool_choice="none", parallel_tool_calls=False) is None


def test_tools_are_called_as_the_model_likes_by_default() -> None:
    use = read(tools=[function(), function("get.the-weather_2", parameters=CITY, strict=True)])
    assert use is not None and (use.choice, use.named, use.parallel_calls) == ("auto", None, True)
    assert use.names == ["add", "get.the-weather_2"]


@pytest.mark.parametrize(
    ("choice", "read_as"),
    [("none", ("none", None)), ("required", ("required", None)), (function(), ("required", "add"))],
)
def test_choices(choice: object, read_as: tuple[str, str | None]) -> None:
    use = read(tools=[function()], tool_choice=choice, parallel_tool_calls=False)
    assert use is not None and (use.choice, use.named) == read_as and not use.parallel_calls


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": {}}, "tools"),
        ({"tools": [function(f"f{i}") for i in range(MAX_TOOLS + 1)]}, "tools"),
        ({"tools": ["add"]}, "tools[0]"),
        ({"tools": [function(), {"type": "web_search"}]}, "tools[1]"),
        ({"tools": [{"type": "function"}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": 1}]}, "tools[0].function"),
        ({"tools": [function("")]}, "tools[0].function.name"),
        ({"tools": [function("x" * (MAX_NAME_CHARS + 1))]}, "tools[0].function.name"),
        ({"tools": [function("two words")]}, "tools[0].function.name"),
        ({"tools": [function(description=1)]}, "tools[0].function.description"),
        ({"tools": [function(parameters="{}")]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters.type"),
        ({"tools": [function(), function()]}, "tools"),
        ({"tools": [function()], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [function()], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [function()], "tool_choice": function("unknown")}, "tool_choice"),
        ({"tools": [function()], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_refusals(values: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        read(**values)
    assert refused.value.param == param


def test_a_named_call_is_its_arguments() -> None:
    grammar = forced_calls(ToolUse([function(), function("locate", parameters=CITY)], "required", "locate"))
    assert grammar.kind == "json_schema" and json.loads(grammar.spec) == CITY
    grammar = forced_calls(ToolUse([function()], "required", "add"))
    assert json.loads(grammar.spec) == {"type": "object", "properties": {}}


def test_required_calls_are_a_list_and_references_stay_whole() -> None:
    tools = [function(), function("locate", parameters=CITY)]
    schema = json.loads(forced_calls(ToolUse(tools, "required", parallel_calls=False)).spec)
    assert (schema["type"], schema["minItems"], schema["maxItems"]) == ("array", 1, 1)
    names = [one["properties"]["name"]["const"] for one in schema["items"]["anyOf"]]
    assert names == ["add", "locate"]
    city = schema["$defs"]["locate"]["properties"]["city"]["$ref"]
    assert city == "#/$defs/locate/$defs/City" and schema["$defs"]["locate"]["$defs"]["City"]
    assert "maxItems" not in json.loads(forced_calls(ToolUse(tools, "required")).spec)


@pytest.mark.parametrize("choice", [None, "locate", "add"], ids=["any", "named", "without parameters"])
def test_engines_can_follow_what_is_required(choice: str | None) -> None:
    tools = [function(), function("locate", parameters=CITY), function("note", parameters={"properties": {}})]
    check(forced_calls(ToolUse(tools, "required", choice)))
