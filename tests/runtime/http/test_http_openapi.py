"""/openapi.json names every route that there is, with what it takes and answers."""

from __future__ import annotations

import re
from typing import Any

import aiohttp
import msgspec
import pytest

from dynrt.runtime.http.app import ROUTES
from dynrt.runtime.http.operations import OPERATIONS


@pytest.fixture
async def document(client: aiohttp.ClientSession) -> dict[str, Any]:
    async with client.get("/openapi.json") as response:
        assert response.content_type == "application/json"
        return await response.json()


async def test_every_route_is_described_and_no_other(document: dict[str, Any]) -> None:
    assert set(ROUTES) == set(OPERATIONS)
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == set(OPERATIONS)


async def test_every_reference_is_defined(document: dict[str, Any]) -> None:
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', msgspec.json.encode(document).decode()))
    assert references == set(document["components"]["schemas"])


async def test_what_takes_a_body_tells_how_it_is_refused(document: dict[str, Any]) -> None:
    for methods in document["paths"].values():
        for operation in methods.values():
            assert {"401", "405", "500"} <= set(operation["responses"])
            if "requestBody" in operation:
                assert {"400", "413", "415"} <= set(operation["responses"])
