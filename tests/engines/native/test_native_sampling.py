"""NativeEngine: penalties, log probabilities and grammars are right, whichever way a request is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from grammar_cases import CASES
from naive_penalties import naive_logit
from native_rig import PROMPT, MakeEngine, hand_off, ids, make_request, run
from tokenizers import Tokenizer

from dynrt.engines.native.logprobs import ROWS_AT_ONCE
from dynrt.engines.native.model import load_model
from dynrt.engines.protocol import EngineRequest, Token
from dynrt.engines.scheduling.batch import Chunk, SampleSpec
from dynrt.runtime.errors import InvalidRequestError
from dynrt.runtime.messages import Grammar, TokenLogprob

TOLERANCE = 1e-4
MOVED_AFTER = 7  # tokens

Way = Callable[[MakeEngine, EngineRequest], list[Token]]


def own_tokens(tokens: list[Token], request: EngineRequest) -> list[Token]:
    return [token for token in tokens if token.key == request.key]


def alone(make_engine: MakeEngine, request: EngineRequest) -> list[Token]:
    engine = make_engine()
    engine.submit(request)
    return run(engine)


def chunked(make_engine: MakeEngine, request: EngineRequest) -> list[Token]:
    engine = make_engine(max_batch_tokens=11)
    engine.submit(request)
    return run(engine)


def behind_a_prefix_hit(make_engine: MakeEngine, request: EngineRequest) -> list[Token]:
    engine = make_engine()
    engine.submit(make_request(90, PROMPT[:50]))
    run(engine)
    engine.submit(request)
    return run(engine)


def among_others(make_engine: MakeEngine, request: EngineRequest) -> list[Token]:
    """Some of which have the same wishes, and some none."""
    engine = make_engine(kv_blocks=80)
    for number in range(4):
        options = {"frequency_penalty": 1.0, "logprobs": 2, "seed": number} if number % 2 else {}
        engine.submit(make_request(90 + number, PROMPT[number : 20 + 5 * number], temperature=1.0, **options))
    engine.submit(request)
    return own_tokens(run(engine), request)


def preempted(make_engine: MakeEngine, request: EngineRequest) -> list[Token]:
    engine = make_engine(kv_blocks=23)
    engine.submit(make_request(90, PROMPT[::-1]))
    engine.submit(request)
    tokens = run(engine)
    assert engine.load().preemptions_total > 0
    return own_tokens(tokens, request)


def handed_off(make_engine: MakeEngine, request: EngineRequest) -> list[Token]:
    _, tokens = hand_off(make_engine(max_batch_tokens=20), make_engine(), request)
    return tokens


def moved(make_engine: MakeEngine, request: EngineRequest) -> list[Token]:
    """To another worker after some tokens."""
    before = alone(make_engine, request)[:MOVED_AFTER]
    engine = make_engine()
    engine.submit(msgspec.structs.replace(request, output_ids=ids(before)))
    return before + run(engine)


WAYS: list[Way] = [chunked, behind_a_prefix_hit, among_others, preempted, handed_off, moved]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.9, "seed": 3, "logprobs": 4, "prompt_logprobs": 3},
    {
        "temperature": 1.0,
        "seed": 5,
        "min_p": 0.02,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.2,
        "logit_bias": ((300, 6.0), (17, -100.0)),
        "logprobs": 1,
    },
    {"presence_penalty": -1.5, "repetition_penalty": 0.8, "prompt_logprobs": 0},
]


def flatten(logprobs: list[TokenLogprob]) -> tuple[list[int], list[float]]:
    """All token ids, and all values, in order."""
    entries = [entry for one in logprobs for entry in ((one.token_id, one.logprob), *one.top)]
    return [token_id for token_id, _ in entries], [value for _, value in entries]


def assert_same_logprobs(found: list[TokenLogprob], expected: list[TokenLogprob]) -> None:
    assert flatten(found)[0] == flatten(expected)[0]
    assert flatten(found)[1] == pytest.approx(flatten(expected)[1], abs=TOLERANCE)


def all_logprobs(tokens: list[Token]) -> list[TokenLogprob]:
    """The prompt's, then the output's."""
    told = [one for token in tokens for one in token.prompt_logprobs or []]
    assert told == [] or told[0] is None
    return [one for one in [*told, *(token.logprob for token in tokens)] if one is not None]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("options", OPTIONS, ids=["logprobs", "all", "greedy"])
def test_the_same_whichever_way(make_engine: MakeEngine, way: Way, options: dict[str, Any]) -> None:
    request = make_request(1, PROMPT, **options)
    expected = alone(make_engine, request)
    assert len(expected) == 24 and len(set(ids(expected))) > 5
    tokens = way(make_engine, request)
    assert ids(tokens) == ids(expected)
    assert [token.logprob is None for token in tokens] == ["logprobs" not in options] * 24
    has_scores = [token.prompt_logprobs is not None for token in tokens]
    assert has_scores == ["prompt_logprobs" in options] + [False] * 23
    assert_same_logprobs(all_logprobs(tokens), all_logprobs(expected))


def test_log_probabilities_equal_transformers(make_engine: MakeEngine, tiny_model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM  # seconds to import

    tokens = alone(
        make_engine, make_request(1, PROMPT, temperature=1.3, top_k=9, logprobs=5, prompt_logprobs=5)
    )
    sequence = [*PROMPT, *ids(tokens)]
    reference = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32)
    with torch.inference_mode():
        exact = reference(torch.tensor([sequence])).logits[0].log_softmax(dim=-1)
    found = all_logprobs(tokens)
    assert len(found) == len(sequence) - 1
    for position, one in enumerate(found):
        best = exact[position].topk(5)
        assert one.token_id == sequence[position + 1]
        values = [one.logprob, *(value for _, value in one.top)]
        assert values == pytest.approx(
            [float(exact[position, one.token_id]), *best.values.tolist()], abs=TOLERANCE
        )
        assert [token_id for token_id, _ in one.top] == best.indices.tolist()
        assert dict(one.top).get(one.token_id, one.logprob) == one.logprob, "the same float"


def test_penalties_and_bias_choose_what_a_plain_loop_chooses(
    make_engine: MakeEngine, tiny_model_dir: Path
) -> None:
    request = make_request(
        1,
        PROMPT,
        presence_penalty=0.8,
        frequency_penalty=0.4,
        repetition_penalty=1.3,
        logit_bias=((250, 3.0), (301, -2.0)),
        logprobs=0,
    )
    model = load_model(tiny_model_dir, torch.float32, torch.device("cpu"))
    kv, block_ids = model.new_kv_cache(16, 8), [*range(16)]
    output_ids: list[int] = []
    for token in alone(make_engine, request):
        chunk = Chunk([*PROMPT, *output_ids], 0, block_ids, SampleSpec(request.sampling, 0))
        raw = model.forward([chunk], kv)[0].tolist()
        logits = [naive_logit(x, i, request.sampling, PROMPT, output_ids) for i, x in enumerate(raw)]
        best = max(range(len(logits)), key=lambda token_id: logits[token_id])
        assert token.token_id == best and token.logprob is not None
        expected = torch.tensor(logits).log_softmax(dim=0)[best].item()
        assert token.logprob.logprob == pytest.approx(expected, abs=TOLERANCE)
        output_ids.append(token.token_id)


@pytest.mark.parametrize("case", CASES)
def test_a_grammar_is_obeyed_at_temperature_1_and_ends_the_request(
    make_engine: MakeEngine, tiny_model_dir: Path, case: str
) -> None:
    """Beside requests without one; ignore_eos and min_tokens give way to the grammar's end."""
    grammar, obeys = CASES[case]
    tokenizer = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    engine = make_engine(kv_blocks=1600)
    options = {"temperature": 1.0, "max_tokens": 1000}
    requests = [
        make_request(number, PROMPT[: 9 + number], grammar=grammar, seed=number, min_tokens=3, **options)
        for number in range(8)
    ]
    for request in requests:
        engine.submit(request)
    engine.submit(make_request(90, PROMPT, temperature=1.0))
    tokens = run(engine)
    texts = set[str]()
    for request in requests:
        mine = own_tokens(tokens, request)
        text = tokenizer.decode(ids(mine)[:-1])
        assert mine[-1].finish_reason == "stop" and mine[-1].token_id in engine.info.eos_token_ids
        assert obeys(text), text
        texts.add(text)
    assert len(texts) > 1, "they differ by seed"
    assert len(engine._constraints._matchers) == 0


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_grammar_gives_the_same_whichever_way(make_engine: MakeEngine, way: Way) -> None:
    grammar = Grammar("regex", "([a-z]{3} )*")
    request = make_request(1, PROMPT, grammar=grammar, temperature=1.0, seed=2, min_tokens=24, logprobs=1)
    expected = alone(make_engine, request)
    assert len(expected) == 24
    tokens = way(make_engine, request)
    assert ids(tokens) == ids(expected)
    assert_same_logprobs(all_logprobs(tokens), all_logprobs(expected))


def test_a_grammar_that_cannot_be_obeyed_is_refused(make_engine: MakeEngine) -> None:
    engine, request = (
        make_engine(),
        make_request(1, PROMPT, grammar=Grammar("json_schema", '{"type": "strnig"}')),
    )
    engine.submit(request)
    [token] = run(engine)
    assert token.finish_reason == "error" and token.error is not None and "strnig" in token.error
    with pytest.raises(InvalidRequestError, match="strnig"):
        engine.reserve(request)
    assert engine.load().blocks_active == 0


def test_an_output_that_breaks_its_grammar_ends_alone(make_engine: MakeEngine) -> None:
    engine = make_engine()
    wrong = msgspec.structs.replace(make_request(1, PROMPT, grammar=Grammar("regex", "a*")), output_ids=[200])
    engine.submit(wrong)
    engine.submit(make_request(2, PROMPT))
    tokens = run(engine)
    [failed] = own_tokens(tokens, wrong)
    assert failed.error is not None and "grammar" in failed.error
    assert len(tokens) == 25 and tokens[-1].finish_reason == "length"
    assert engine.load().blocks_active == 0


def test_long_prompts_are_scored_in_bounded_memory(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_batch_tokens=512, kv_blocks=100)
    rows: list[int] = []
    to_logits = engine._model.logits

    def counted(x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return to_logits(x)

    monkeypatch.setattr(engine._model, "logits", counted)
    engine.submit(make_request(1, PROMPT * 9, max_tokens=1, prompt_logprobs=1))
    [token] = run(engine)
    assert token.prompt_logprobs is not None and len(token.prompt_logprobs) == 75 * 9
    assert max(rows) == ROWS_AT_ONCE and sum(rows) == 75 * 9 - 1 + 1
