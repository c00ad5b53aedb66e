"""The served model as the runtime knows it: its directory, its prompts, its limits."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from dynrt.engines.models.resolve import ModelDir, find_ready
from dynrt.runtime.errors import ModelLoadError
from dynrt.runtime.offload import Offload

PREPARE_TIMEOUT_S = 3600.0


class _Failure(msgspec.Struct, frozen=True):
    error: str


async def find_model(model: str | None, offload: Offload) -> ModelDir:
    """Fetch and convert it first if need be, in a process of its own: the runtime stays small.

    Its progress goes to standard error. `offload` looks at what is there, which can mean to hash a large file.
    Raises ModelLoadError.
    """
    ready = await offload.run(lambda: find_ready(model))
    return ready if ready is not None else await _prepare(model)


async def _prepare(model: str | None) -> ModelDir:
    arguments = [] if model is None else [model]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "dynrt.engines.models", *arguments, stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(PREPARE_TIMEOUT_S):
            stdout, _ = await process.communicate()
    except BaseException as error:
        process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            raise ModelLoadError(f"preparing the model took over {PREPARE_TIMEOUT_S:g} s") from error
        raise
    if process.returncode == 0:
        return msgspec.json.decode(stdout, type=ModelDir)
    try:
        reason = msgspec.json.decode(stdout, type=_Failure).error
    except msgspec.DecodeError:
        reason = f"preparing the model ended with status {process.returncode}; it says why above"
    raise ModelLoadError(reason)
