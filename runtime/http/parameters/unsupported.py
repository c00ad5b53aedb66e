"""The parameters that would change a result and are not built: refused by name, never ignored.

Fields that are named nowhere in this package are tolerated: clients send fields of other servers.
"""

from __future__ import annotations

from typing import Any

from dynrt.runtime.http.parameters.fields import Fields, shown

# name: the values that ask for nothing, besides null
_BOTH: dict[str, tuple[Any, ...]] = {
    "bad_words": ([],),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
CHAT: dict[str, tuple[Any, ...]] = {
    **_BOTH,
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
}
COMPLETIONS: dict[str, tuple[Any, ...]] = {
    **_BOTH,
    "prompt_embeds": (),
    "suffix": ("",),
}


def refuse_unsupported(fields: Fields, table: dict[str, tuple[Any, ...]]) -> None:
    """Note every parameter of `table` that is set to something that would have to change the result."""
    if table.keys().isdisjoint(fields.values):
        return  # as nearly always
    for name, harmless in table.items():
        value = fields.values.get(name)
        if value is not None and not any(_same(value, one) for one in harmless):
            fields.problems.add(
                name, f"{name} is {shown(value)}, but {name} is not supported yet; leave it out"
            )


def _same(value: object, other: object) -> bool:
    """Equality in which false is not 0 and true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
