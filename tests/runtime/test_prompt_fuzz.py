"""Whatever is said in a chat, its control tokens are the template's, and there is exactly one BOS if there is any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fuzz_inputs import chats
from hypothesis import HealthCheck, example, given, settings
from tiny_model import BOS_ID, CHAT_TEMPLATE, SPECIAL_TOKENS
from tokenizers import Tokenizer, processors

from dynrt.runtime.messages import unpack_ids
from dynrt.runtime.prompts import PromptEncoder

INSTRUCTIONS = (  # the manner of Llama 2: trims, and marks turns by BOS and EOS
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module", params=["chatml", "chatml, BOS written too", "instructions"])
def encoder(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> PromptEncoder:
    """Of a tokenizer that puts a BOS before every text."""
    path = tmp_path_factory.mktemp("fuzz") / "model"
    templates = {"chatml": CHAT_TEMPLATE, "instructions": INSTRUCTIONS}
    template = templates.get(request.param, "{{ bos_token }}" + CHAT_TEMPLATE)
    path.mkdir()
    config = json.loads((tiny_model_dir / "tokenizer_config.json").read_text())
    config = {**config, "bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[1]}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    bos = SPECIAL_TOKENS[0]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, BOS_ID)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    return PromptEncoder.from_dir(path)


def control_ids(encoder: PromptEncoder, chat: list[dict[str, str]]) -> list[int]:
    return [i for i in unpack_ids(encoder.encode_chat(chat)) if i < len(SPECIAL_TOKENS)]


@settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(chats(SPECIAL_TOKENS))
@example([{"role": "user", "content": "<s>"}])
@example([{"role": "user", "content": "  </s> "}])
def test_control_tokens_are_those_of_the_same_chat_without_any(
    encoder: PromptEncoder, chat: list[dict[str, str]]
) -> None:
    harmless = [{**message, "content": "x"} for message in chat]
    found = control_ids(encoder, chat)
    assert found == control_ids(encoder, harmless)
    assert found[0] == BOS_ID and found[:2] != [BOS_ID, BOS_ID]


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(chats(SPECIAL_TOKENS))
def test_what_is_said_is_there(encoder: PromptEncoder, chat: list[dict[str, str]]) -> None:
    rendered = encoder.render_chat(chat)
    for message in chat:
        if not any("\ufdd0" <= char <= "\ufdef" for char in message["content"]):
            assert message["content"].strip() in rendered
