"""What fuzzing sends: bodies that are JSON or not, requests that are nearly right, chats full of control tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
PLAUSIBLE = st.sampled_from([True, False, 0, 1, 2, -1, 0.5, 1e300, "", "a", [], {}, [1, 2], ["a"], {"1": 2}])
ROLES = st.sampled_from(["system", "user", "assistant", "developer", "tool", "function", ""])
PART = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "input_text", "image_url", "tool_use", "tool_result"])},
    optional={"text": JSON, "content": JSON, "id": JSON, "tool_use_id": JSON, "name": JSON, "input": JSON},
)
CALL = st.fixed_dictionaries(
    {},
    optional={
        "id": JSON,
        "type": st.just("function") | JSON,
        "function": JSON | st.fixed_dictionaries({"name": JSON, "arguments": JSON}),
    },
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": ROLES | JSON,
        "content": st.text(max_size=8) | st.lists(PART, max_size=2) | JSON,
        "tool_calls": st.lists(CALL, max_size=2) | JSON,
        "tool_call_id": JSON,
        "name": JSON,
        "reasoning": JSON,
    },
)
TOOL = st.fixed_dictionaries(
    {"type": st.just("function")},
    optional={
        "name": JSON,
        "parameters": JSON,
        "function": JSON | st.fixed_dictionaries({"name": JSON}, optional={"parameters": JSON}),
    },
)
PROMPT = st.text(max_size=8) | st.lists(st.integers(0, 1100), max_size=4)
LIKELY = {
    "messages": st.lists(MESSAGE, max_size=3),
    "prompt": PROMPT | st.lists(PROMPT, max_size=3),
    "input": st.text(max_size=8) | st.lists(MESSAGE, max_size=3),
    "tokens": st.lists(st.integers(0, 1100), max_size=4),
    "tools": st.lists(TOOL, max_size=2),
    "max_tokens": st.integers(0, 70),
    "n": st.integers(0, 4),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "logprobs": st.booleans() | st.integers(-1, 6),
    "model": st.just("acme/tiny") | st.text(max_size=4),
}


def bodies(names: Iterable[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with fields of these `names`, each of which is right, nearly right or anything."""
    fields = {name: LIKELY.get(name, PLAUSIBLE) | PLAUSIBLE | JSON for name in names}
    sound = {name: LIKELY[name] for name in ("messages", "prompt", "input", "tokens") if name in fields}
    rest = {name: value for name, value in fields.items() if name not in sound}
    return st.fixed_dictionaries(sound, optional=rest) | st.fixed_dictionaries({}, optional=fields)


def raw_bodies(names: Iterable[str]) -> st.SearchStrategy[bytes]:
    """Bytes: of such objects, of any JSON, of JSON that is cut off or spoilt, or any at all."""
    whole = (bodies(names) | JSON).map(lambda value: json.dumps(value).encode())
    spoilt = st.tuples(whole, st.integers(0, 200), st.binary(max_size=3)).map(
        lambda parts: parts[0][: parts[1]] + parts[2] + parts[0][parts[1] :]
    )
    cut = st.tuples(whole, st.integers(0, 200)).map(lambda parts: parts[0][: parts[1]])
    return st.one_of(whole, whole, spoilt, cut, st.binary(max_size=64))


def chats(control_tokens: Iterable[str]) -> st.SearchStrategy[list[dict[str, str]]]:
    """Messages of users who write the model's control tokens, whole, in pieces and inside one another."""
    tokens = list(control_tokens)
    pieces = [
        *tokens,
        *(token[:2] for token in tokens),
        *(token[2:] for token in tokens),
        " ",
        "h",
        "é",
        "\n",
    ]
    text = st.lists(st.sampled_from(pieces), max_size=6).map("".join) | st.text(max_size=12)
    turn = st.tuples(text, text).map(
        lambda texts: [
            {"role": "user", "content": texts[0]},
            {"role": "assistant", "content": texts[1]},
        ]
    )
    turns = st.lists(turn, max_size=3).map(lambda nested: [message for one in nested for message in one])
    return st.tuples(turns, text).map(lambda parts: [*parts[0], {"role": "user", "content": parts[1]}])
