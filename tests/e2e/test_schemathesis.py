"""schemathesis, against /openapi.json: no request that it thinks of brings a server error or an undocumented answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from client_environment import client_python
from live_server import embedded
from tiny_model import write_tiny_model

from dynrt.engines.config import SimConfig
from dynrt.runtime import RuntimeConfig

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(400),  # the first time, its environment is built
]

CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
LIMIT_S = 200.0


@pytest.fixture(scope="module")
def schemathesis() -> Path:
    return client_python("schemathesis", ["schemathesis==4.32.5"]).with_name("schemathesis")


async def passes(schemathesis: Path, url: str, *arguments: object, cwd: Path) -> None:
    """A run with the four checks; /v1/embeddings is left out, as its 501 is a server error by the first of them."""
    process = await asyncio.create_subprocess_exec(
        str(schemathesis), "run", f"{url}/openapi.json",
        *("--checks", CHECKS, "--continue-on-failure", "--exclude-path", "/v1/embeddings", "--seed", "1"),
        *map(str, arguments),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=cwd,
    )  # fmt: skip
    try:
        async with asyncio.timeout(LIMIT_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode == 0, output.decode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """With little context: most of these requests leave out how much is to be generated."""
    return str(write_tiny_model(tmp_path_factory.mktemp("schemathesis") / "llama", context=128))


async def test_every_route(schemathesis: Path, model: str, tmp_path: Path) -> None:
    config = RuntimeConfig(model, engine="sim", sim=SimConfig(speedup=10_000.0))
    async with embedded(config) as server:
        await passes(schemathesis, server.url, "--max-examples", 4, cwd=tmp_path)


async def test_generation_on_the_native_engine(schemathesis: Path, model: str, tmp_path: Path) -> None:
    config = RuntimeConfig(model, prefill=0, dtype="float32", kv_blocks=512)
    async with embedded(config) as server:
        routes = "--include-path-regex", "^/v1/(.*completions|responses|messages)$"
        await passes(
            schemathesis, server.url, *routes, "--phases", "fuzzing", "--max-examples", 3, cwd=tmp_path
        )
