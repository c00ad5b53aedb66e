"""What is fixed of a vLLM engine once its model is loaded."""

from __future__ import annotations

from pathlib import Path

from vllm import LLMEngine

from dynrt.engines.models.directory import eos_token_ids
from dynrt.engines.protocol import EngineInfo
from dynrt.runtime.messages import KvConnector
from dynrt.transfer.layout import KvGeometry


def info_of(llm: LLMEngine, geometry: list[KvGeometry], kv_connector: KvConnector) -> EngineInfo:
    """vLLM's decode recomputes the last prompt token, so it samples the first token itself."""
    model = llm.model_config
    return EngineInfo(
        kind="vllm",
        context_length=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        eos_token_ids=_eos_token_ids(llm),
        geometry=geometry,
        first_token_from="decode",
        takes_grammar=True,
        kv_connector=kv_connector,
    )


def _eos_token_ids(llm: LLMEngine) -> frozenset[int]:
    """vLLM ends at those of the model's configuration files and at the tokenizer's."""
    model = llm.model_config
    of_config = getattr(model.hf_text_config, "eos_token_id", None)
    of_tokenizer = llm.renderer.get_eos_token_id()
    ids = eos_token_ids(Path(model.model), of_config)
    return frozenset(ids if of_tokenizer is None else (*ids, of_tokenizer))
