"""Grammars on a tiny tokenizer: what is allowed, resuming, and what is refused."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from grammar_cases import CASES
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dynrt.engines.native.grammar import GrammarCompiler, GrammarMatcher, check
from dynrt.runtime.errors import InvalidRequestError
from dynrt.runtime.messages import Grammar

VOCAB, EOS_IDS = 512, frozenset({1, 4})


@pytest.fixture(scope="module")
def compiler(tiny_model_dir: Path) -> GrammarCompiler:
    return GrammarCompiler(str(tiny_model_dir / "tokenizer.json"), VOCAB, EOS_IDS)


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))


def allowed_ids(matcher: GrammarMatcher, banned_ids: tuple[int, ...] = ()) -> list[int]:
    bits = matcher.allowed(banned_ids)
    assert len(bits) == VOCAB // 8
    return [i for i in range(VOCAB) if bits[i // 8] >> (i % 8) & 1]


def spell(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    text: str = tokenizer.decode(token_ids)
    return text


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_any_walk_that_ends_obeys_and_can_be_resumed_anywhere(
    compiler: GrammarCompiler, tokenizer: Tokenizer, case: str, seed: int
) -> None:
    grammar, obeys = CASES[case]
    matcher, output_ids, rng = compiler.matcher(grammar), list[int](), random.Random(seed)
    for _ in range(300):
        matcher.follow(output_ids)
        allowed = allowed_ids(matcher)
        assert allowed and matcher.find_error() is None
        if rng.random() < 0.1:
            resumed = compiler.matcher(grammar)
            resumed.follow(output_ids)
            assert allowed_ids(resumed) == allowed
        closing = [token_id for token_id in allowed if spell(tokenizer, [token_id]) == ")"]
        next_id = rng.choice(closing if closing and rng.random() < 0.5 else allowed)
        if next_id in EOS_IDS:
            assert obeys(spell(tokenizer, output_ids)), spell(tokenizer, output_ids)
            return
        output_ids.append(next_id)
    raise AssertionError(f"no end in {spell(tokenizer, output_ids)!r}")


def test_json_objects_are_begun_and_ended(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(Grammar("json_object"))
    assert [spell(tokenizer, [token_id])[0] for token_id in allowed_ids(matcher)] == ["{"]
    output_ids = tokenizer.encode('{"a": [1, {"b": null}]}').ids
    matcher.follow(output_ids[:-1])
    assert not EOS_IDS & set(allowed_ids(matcher))
    matcher.follow(output_ids)
    assert set(allowed_ids(matcher)) == EOS_IDS


def test_white_space_ends(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(Grammar("json_object"))
    [space] = tokenizer.encode(" ").ids
    output_ids = [*tokenizer.encode("{").ids, *[space] * 40]
    matcher.follow(output_ids)
    assert space not in allowed_ids(matcher) and matcher.find_error() is None


def test_bans_hold_unless_nothing_else_is_allowed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(Grammar("regex", "ab?"))
    matcher.follow(tokenizer.encode("a").ids)
    assert set(allowed_ids(matcher)) == EOS_IDS | set(tokenizer.encode("b").ids)
    assert allowed_ids(matcher, tuple(EOS_IDS)) == tokenizer.encode("b").ids
    matcher.follow([*tokenizer.encode("a").ids, *tokenizer.encode("b").ids])
    assert set(allowed_ids(matcher, tuple(EOS_IDS))) == EOS_IDS


def test_output_that_breaks_the_grammar_is_an_error(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.matcher(Grammar("choice", '["yes"]'))
    matcher.follow(tokenizer.encode("no").ids)
    error = matcher.find_error()
    assert error is not None and "cannot be followed" in error and "\n" not in error


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        (Grammar("json_schema", "{nope"), "key must be a string"),
        (Grammar("json_schema", "[]"), "object"),
        (Grammar("json_schema", '{"type": "strnig"}'), "strnig"),
        (Grammar("json_schema", '{"properties": {"a": {"$ref": "#/nowhere"}}}'), "/nowhere"),
        (Grammar("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (Grammar("regex", "a("), "regex"),
        (Grammar("choice", "[]"), "one or more strings"),
        (Grammar("choice", "[1]"), "one or more strings"),
        (Grammar("choice", '["a"'), "delimiter"),
        (Grammar("grammar", "root ::= other"), "other"),
    ],
    ids=str,
)
def test_what_cannot_be_obeyed_is_refused_alike_with_a_tokenizer_and_without(
    compiler: GrammarCompiler, grammar: Grammar, word: str
) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be obeyed") as without:
        check(grammar)
    with pytest.raises(InvalidRequestError) as with_tokenizer:
        compiler.matcher(grammar)
    assert word in without.value.message and "\n" not in without.value.message
    assert with_tokenizer.value.message == without.value.message


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'),
        Grammar("regex", "(((a{1,100}){1,100}){1,100}){1,100}"),
    ],
    ids=str,
)
def test_what_turns_out_to_be_too_complex_only_as_it_is_followed_is_refused(grammar: Grammar) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be obeyed"):
        check(grammar)


def test_what_can_be_obeyed_passes_the_check() -> None:
    for grammar, _ in CASES.values():
        check(grammar)
    check(Grammar("json_object"))
    check(Grammar("choice", '["a"]'))
    check(Grammar("grammar", "start: <|im_end|>"))
    check(Grammar("json_schema", json.dumps({"enum": [f"value {number}" for number in range(10_000)]})))
    nodes = {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}
    check(Grammar("json_schema", json.dumps({"$defs": nodes, "$ref": "#/$defs/node"})))
