"""Real engines with KV blocks of different sizes hand off: the tokens are those of the prefill engine alone."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
from rig.engine_pair import EnginePair

from dynrt.engines.config import EngineConfig
from dynrt.transfer.options import TransferOptions

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize(("kind", "prefill_size", "decode_size"), [("native", 16, 64), ("sim", 64, 16)])
async def test_a_prompt_decodes_as_if_it_had_never_moved(
    tiny_model_dir: Path, tmp_path: Path, kind: str, prefill_size: int, decode_size: int
) -> None:
    """Prompts that end inside and at the end of blocks; the later ones find their beginning on both sides."""
    config = EngineConfig(
        str(tiny_model_dir),
        "tiny",
        kind,
        dtype="float32",
        threads=1,
        kv_blocks=64,
        block_size=prefill_size,
        max_batch_tokens=150,
        transfer=TransferOptions(verify=True),
    )
    decode = msgspec.structs.replace(config, block_size=decode_size)
    draw = random.Random(5)
    prompt_ids = [draw.randrange(5, 250) for _ in range(320)]
    async with EnginePair(config, tmp_path, decode) as pair:
        for num_tokens in (200, 201, 256, 320, 320, 16):
            for mode in ("layerwise", "whole"):
                run = await pair.run(prompt_ids[:num_tokens], mode)
                wanted = await pair.continuation(prompt_ids[:num_tokens], run.token_ids[0])
                assert run.token_ids[1:] == wanted, f"{num_tokens} tokens, {mode}"
