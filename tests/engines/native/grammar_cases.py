"""Grammars that end soon even when tokens are drawn at random, each with a judge of its texts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from dynrt.runtime.messages import Grammar

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 5},
            "size": {"enum": ["small", "größer"]},
            "counts": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["name", "size", "counts"],
        "additionalProperties": False,
    }
)


def is_of_schema(text: str) -> bool:
    value = json.loads(text)
    return (
        value.keys() == {"name", "size", "counts"}
        and len(value["name"]) <= 5
        and value["size"] in ("small", "größer")
        and len(value["counts"]) <= 3
        and all(isinstance(count, bool) for count in value["counts"])
    )


CASES: dict[str, tuple[Grammar, Callable[[str], object]]] = {
    "schema": (Grammar("json_schema", SCHEMA), is_of_schema),
    "regex": (Grammar("regex", "[a-f]{2,7}-é?[0-9]"), re.compile("[a-f]{2,7}-é?[0-9]").fullmatch),
    "choice": (
        Grammar("choice", '["yes", "yes, but", "nö\\n\\"q\\""]'),
        {"yes", "yes, but", 'nö\n"q"'}.__contains__,
    ),
    "ebnf": (
        Grammar("grammar", 'root ::= "(" (root | "x" | "yz") ")"'),
        re.compile(r"\(+(x|yz)\)+").fullmatch,
    ),
}
