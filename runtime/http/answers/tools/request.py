"""The tools that a request offers, and whether and which of them it wants called; checked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from dynrt.runtime.http.parameters.fields import Fields
from dynrt.runtime.http.parameters.request_schema import Parameter, boolean
from dynrt.runtime.messages import Grammar

MAX_TOOLS = 1536
MAX_NAME_CHARS = 96

_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_NAME_CHARS}}}")

Choice = tuple[Literal["none", "auto", "required"], str | None]  # and the one tool that must be called


class ToolUse(msgspec.Struct, frozen=True):
    """`tools`: OpenAI's function tools, as chat templates take them. A `named` one is required."""

    tools: list[dict[str, Any]]
    choice: Literal["none", "auto", "required"] = "auto"
    named: str | None = None
    parallel_calls: bool = True

    @property
    def names(self) -> list[str]:
        """Of the tools that may be called."""
        return [self.named] if self.named else _names(self.tools)

    @property
    def schemas(self) -> dict[str, dict[str, Any]]:
        """The JSON schemas of all tools' arguments, by name."""
        functions = [tool["function"] for tool in self.tools]
        return {
            one["name"]: {"type": "object", **(one.get("parameters") or {"properties": {}})}
            for one in functions
        }


def _names(tools: Sequence[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


def asked_tool_use(fields: Fields, values: dict[str, Any]) -> ToolUse | None:
    """What `values`, those of TOOL_PARAMETERS, say together; None if no tools are offered.

    Problems are left with `fields`.
    """
    tools, (choice, named) = values["tools"], values["tool_choice"]
    if not tools:
        if fields.values.get("tools") is None and fields.values.get("tool_choice") not in (None, "none"):
            fields.refuse("tool_choice", "it must be left out, or tools be given")
        return None
    if named is not None and named not in _names(tools):
        fields.refuse("tool_choice", "it must name one of the tools")
        return None
    return ToolUse(tools, choice, named, values["parallel_tool_calls"])


def _read_tools(fields: Fields) -> list[dict[str, Any]]:
    tools = fields.values["tools"]
    if not isinstance(tools, list) or not 1 <= len(tools) <= MAX_TOOLS:
        fields.refuse("tools", f"it must be a list of 1 to {MAX_TOOLS} tools, or left out")
        return []
    read = [_read_tool(fields, index, tool) for index, tool in enumerate(tools)]
    return _without_doubles(fields, [tool for tool in read if tool is not None])


def _read_tool(fields: Fields, index: int, value: object) -> dict[str, Any] | None:
    path = f"{fields.param('tools')}[{index}]"
    if not isinstance(value, dict) or value.get("type") != "function":
        fields.problems.add(
            path,
            f'{path} must be {{"type": "function", "function": {{…}}}}; tools of the server are not built',
        )
        return None
    function = Fields(value, fields.problems, path).child("function")
    name = function.values.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        function.refuse("name", f"it must be 1 to {MAX_NAME_CHARS} letters, digits or _ . -")
        return None
    description = function.values.get("description")
    if description is not None and not isinstance(description, str):
        function.refuse("description", "it must be a string")
    parameters = function.child("parameters")
    if parameters.values.get("type") not in (None, "object"):
        parameters.refuse("type", 'it must be "object": arguments have names')
    return value


def _without_doubles(fields: Fields, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    names = _names(tools)
    if len(set(names)) < len(names):
        double = next(name for name in names if names.count(name) > 1)
        fields.problems.add("tools", f"tools has {double} more than once; each name must be there once")
    return tools


def _read_choice(fields: Fields) -> Choice:
    match fields.values["tool_choice"]:
        case "none" | "auto" | "required" as word:
            return word, None
        case {"type": "function", "function": {"name": str(name)}}:
            return "required", name
    fields.refuse(
        "tool_choice",
        'it must be "auto", "none", "required" or {"type": "function", "function": {"name": "…"}}',
    )
    return "auto", None


def forced_calls(use: ToolUse) -> Grammar:
    """What the answer must look like if a call is required: the arguments of the named tool, or a list of calls."""
    if use.named is not None:
        return _grammar(use.schemas[use.named])
    one_call = {"anyOf": [_call_schema(name) for name in use.names]}
    calls: dict[str, Any] = {"type": "array", "minItems": 1, "items": one_call}
    if not use.parallel_calls:
        calls["maxItems"] = 1
    schemas = {name: _moved(schema, f"#/$defs/{name}") for name, schema in use.schemas.items()}
    return _grammar({**calls, "$defs": schemas})


def _grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar("json_schema", msgspec.json.encode(schema).decode())


def _call_schema(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{name}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """`schema`, whose references are to itself as a whole document, as part of another one at `place`."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: place + value[1:]
        if key == "$ref" and isinstance(value, str) and value.startswith("#")
        else _moved(value, place)
        for key, value in schema.items()
    }


_FUNCTION = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": f"^{_NAME.pattern}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
    },
    "required": ["name"],
}
_TOOL = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
    "required": ["type", "function"],
}
_NAMED_CHOICE = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
TOOLS = Parameter[list[dict[str, Any]]](
    "tools",
    "Functions that the model may call, with the JSON schema of their arguments. Names must differ.",
    {"type": ["array", "null"], "minItems": 1, "maxItems": MAX_TOOLS, "items": _TOOL},
    _read_tools,
    [],
)
TOOL_CHOICE = Parameter[Choice](
    "tool_choice",
    "Whether to call tools. A required call, or that of a named one, needs engines that follow grammars.",
    {"anyOf": [{"enum": ["none", "auto", "required", None]}, _NAMED_CHOICE]},
    _read_choice,
    ("auto", None),
)
PARALLEL_CALLS = boolean("parallel_tool_calls", "Whether one answer may have several calls.", True)
TOOL_PARAMETERS: tuple[Parameter[Any], ...] = (TOOLS, TOOL_CHOICE, PARALLEL_CALLS)
