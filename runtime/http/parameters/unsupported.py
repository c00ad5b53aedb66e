"""The parameters that would change a result and are not built: refused by name, never ignored.

Fields that are named nowhere in this package are tolerated: clients send fields of other servers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from dynrt.runtime.http.parameters.fields import Fields, shown


class Unsupported(NamedTuple):
    """A parameter that is not built. `harmless`: the values that ask for nothing, besides null."""

    harmless: tuple[Any, ...] = ()
    way_out: str = "leave it out"


_NO_BEAMS = "leave it out, and set n to get several answers"

_BOTH = {
    "bad_words": Unsupported(([],), "leave it out, or ban single tokens by a logit_bias of -100"),
    "kv_transfer_params": Unsupported(({},)),
    "length_penalty": Unsupported((1,), _NO_BEAMS),
    "guided_choice": Unsupported((), "use structured_outputs.choice"),
    "guided_grammar": Unsupported((), "use structured_outputs.grammar"),
    "guided_json": Unsupported((), "use response_format or structured_outputs.json"),
    "guided_regex": Unsupported((), "use structured_outputs.regex"),
    "use_beam_search": Unsupported((False,), _NO_BEAMS),
}
CHAT = {
    **_BOTH,
    "add_special_tokens": Unsupported((False,), "leave it out: the chat template writes them"),
    "audio": Unsupported(),
    "chat_template": Unsupported((), "leave it out, or render the chat yourself and use /v1/completions"),
    "documents": Unsupported(([],), "put them into messages, or into chat_template_kwargs"),
    "echo": Unsupported((False,), "leave it out, or use /v1/completions"),
    "function_call": Unsupported(("none",), "use tool_choice"),
    "functions": Unsupported(([],), "use tools"),
    "modalities": Unsupported((["text"],)),
    "prediction": Unsupported(),
    "verbosity": Unsupported(),
    "web_search_options": Unsupported(),
}
COMPLETIONS = {
    **_BOTH,
    "prompt_embeds": Unsupported(),
    "suffix": Unsupported(
        ("",), "leave it out, or put the model's own tokens for filling in into the prompt"
    ),
}


def refuse_unsupported(fields: Fields, table: dict[str, Unsupported]) -> None:
    """Note every parameter of `table` that is set to something that would have to change the result."""
    if table.keys().isdisjoint(fields.values):
        return  # as nearly always
    for name, unsupported in table.items():
        value = fields.values.get(name)
        if value is not None and not any(_same(value, one) for one in unsupported.harmless):
            problem = f"{name} is {shown(value)}, but {name} is not supported; {unsupported.way_out}"
            fields.problems.add(name, problem)


def _same(value: object, other: object) -> bool:
    """Equality in which false is not 0 and true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
