"""Chat templates: Jinja sources from a model directory, rendered in a sandbox as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dynrt.runtime.errors import InvalidRequestError, ModelLoadError

_MAX_RENDERED_CHARS = 16 << 20
# What a template's own expressions raise on messages of a shape it does not expect.
_RENDER_ERRORS = (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


class ChatTemplate:
    """One compiled template. Rendering is pure and may happen in any thread."""

    def __init__(self, source: str, now: Callable[[], datetime]) -> None:
        try:
            self._template = _environment(now).from_string(source)
            tree = self._template.environment.parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"the model's chat template is broken in line {error.lineno}: {error}"
            ) from error
        # A ChainMap, as jinja2 makes it, is ten times as slow to copy, which is done for every rendering.
        self._template.globals = self._globals = dict(self._template.globals)
        self.source = source
        self.wants_parts = _iterates_over_content(tree) and not _tests_for_string(tree)
        self.knows_developer = "developer" in source

    def render(self, variables: Mapping[str, Any]) -> str:
        """InvalidRequestError with the template's own message if it refuses the conversation."""
        try:
            return self._bounded(variables)
        except RecursionError as error:
            raise InvalidRequestError("the messages are nested too deeply", param="messages") from error
        except _RENDER_ERRORS as error:
            raise InvalidRequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error

    def _bounded(self, variables: Mapping[str, Any]) -> str:
        pieces: list[str] = []
        num_chars = 0
        context = self._template.new_context({**self._globals, **variables}, shared=True)
        render = self._template.root_render_func  # jinja2's `generate` only rewrites the traces of errors
        for piece in render(context):
            num_chars += len(piece)
            if num_chars > _MAX_RENDERED_CHARS:
                raise ValueError(f"the prompt is longer than {_MAX_RENDERED_CHARS} characters")
            pieces.append(piece)
        return "".join(pieces)


class _GenerationTag(Extension):
    """{% generation %} marks the assistant's part for training; for serving it is its body."""

    tags = {"generation"}  # noqa: RUF012  (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with less ado about what nearly all attributes are: a message's field, or a loop's position."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute]
        if type(obj) is LoopContext and attribute in _LOOP_POSITIONS:
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)


_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_POSITIONS = ("first", "last", "index", "index0", "length")  # numbers and truth values


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _iterates_over_content(tree: nodes.Template) -> bool:
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    )


def _tests_for_string(tree: nodes.Template) -> bool:
    return any(test.name == "string" for test in tree.find_all(nodes.Test))
