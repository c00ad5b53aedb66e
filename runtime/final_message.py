"""Cuts a rendered conversation behind its last message's text, so that the model goes on with that message.

The text gets a mark at its end before it is rendered, and what was rendered is cut at the mark.
"""

from __future__ import annotations

from typing import Any

from dynrt.runtime.errors import InvalidRequestError

_MARK = "\U0010ffff"  # a noncharacter
_SPACE = " "  # behind the mark: gone if the template trims the text


def with_marked_end(message: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """`message` with a mark at the end of its text, and that text; its content is text or text parts."""
    content = message["content"]
    if isinstance(content, str):
        return {**message, "content": content + _MARK + _SPACE}, content
    if not content:
        raise InvalidRequestError("the last message has no text to go on with", param="messages")
    *parts, last = content
    text: str = last["text"]
    return {**message, "content": [*parts, {**last, "text": text + _MARK + _SPACE}]}, text


def up_to_mark(rendered: str, text: str) -> str:
    """`rendered` up to the mark, without the space before it where the template trims."""
    before, mark, behind = rendered.rpartition(_MARK)
    if not mark or text.strip() not in before:
        raise InvalidRequestError(
            "continue_final_message is true, but the model's chat template does not write the last message as it is;"
            " leave continue_final_message out",
            param="continue_final_message",
        )
    return before if behind.startswith(_SPACE) else before.rstrip()
