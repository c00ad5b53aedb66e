"""GET /openapi.json: the routes in OpenAPI 3.1, generated from the table of operations and the structs it names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from http import HTTPStatus
from typing import Any

import msgspec

from dynrt.runtime.http.operations import OPERATIONS, Operation, Struct
from dynrt.runtime.http.probes import VERSION
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.response import Response

ALWAYS = (401, 405, 431, 500)
KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
PATH_PARAMETER = re.compile(r"\{(\w+)\}")

Json = dict[str, Any]


async def show_openapi(request: Request) -> Response:
    return Response(_encoded())


@cache
def _encoded() -> bytes:
    return msgspec.json.encode(describe(OPERATIONS))


def describe(operations: Mapping[tuple[str, str], Operation]) -> Json:
    """The document for `operations`, by (method, path)."""
    schemas, components = _schemas(operations.values())
    paths: dict[str, Json] = {}
    for (method, path), operation in operations.items():
        paths.setdefault(path, {})[method.lower()] = _described(path, operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "dynrt", "version": VERSION},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": KEYS},
        "security": [{}, *({name: []} for name in KEYS)],  # with or without a key, as the server is set up
    }


def _schemas(operations: Iterable[Operation]) -> tuple[dict[Struct, Json], Json]:
    """A reference to each struct that operations name, and what they refer to."""
    named = (struct for one in operations for struct in (one.answer, one.event, one.error))
    structs = list(dict.fromkeys(struct for struct in named if struct is not None))
    references, components = msgspec.json.schema_components(
        structs, ref_template="#/components/schemas/{name}"
    )
    return dict(zip(structs, references, strict=True)), components


def _described(path: str, operation: Operation, schemas: Mapping[Struct, Json]) -> Json:
    error = {"application/json": {"schema": schemas[operation.error]}}
    answers: Json = {} if 501 in operation.errors else {"200": _answered(operation, schemas)}
    for status in sorted((*operation.errors, *ALWAYS)):
        answers[str(status)] = {"description": HTTPStatus(status).phrase, "content": error}
    described: Json = {"summary": operation.summary, "responses": answers}
    if operation.body is not None:
        content = {"application/json": {"schema": operation.body}}
        described["requestBody"] = {"required": True, "content": content}
    parameters = [_parameter(name) for name in PATH_PARAMETER.findall(path)]
    if parameters:
        described["parameters"] = parameters
    return described


def _answered(operation: Operation, schemas: Mapping[Struct, Json]) -> Json:
    answer: Json = {} if operation.answer is None else {"schema": schemas[operation.answer]}
    content = {operation.media_type: answer}
    if operation.event is not None:
        content["text/event-stream"] = {
            "schema": {"type": "string"},
            "x-event-schema": schemas[operation.event],
        }
    return {"description": HTTPStatus.OK.phrase, "content": content}


def _parameter(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
