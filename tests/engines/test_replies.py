"""From tokens to deltas: text in pieces, stop strings, end tokens left out, requests closed once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_text import END, byte_level, ids

from dynrt.engines.protocol import Token
from dynrt.engines.replies import Replies
from dynrt.runtime.messages import (
    FinishReason,
    Frame,
    Purpose,
    SamplingParams,
    Submit,
    TextDelta,
    TokenDelta,
    pack_ids,
)

KEY = b"k" * 16
FRAME = Frame(b'data: {"text":', b"}\n\n")
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def open_reply(purpose: Purpose = "generate", sent: str = "", **sampling: Any) -> Replies:
    """One request, of which `sent` was generated and sent before."""
    replies = Replies(byte_level())
    prompt_ids = pack_ids(ids("prompt"))
    submit = Submit(KEY, 0, purpose, prompt_ids, SamplingParams(99, **sampling), traceparent=TRACEPARENT)
    replies.open(submit, ids(sent), len(sent))
    return replies


def open_framed(sent: str = "", key: bytes = KEY, replies: Replies | None = None) -> Replies:
    """One more request, whose text goes out as events; its number is the first byte of its key."""
    replies = Replies(byte_level()) if replies is None else replies
    prompt_ids = pack_ids(ids("prompt"))
    submit = Submit(key, 0, "generate", prompt_ids, SamplingParams(99), frame=FRAME, number=key[0])
    replies.open(submit, ids(sent), len(sent))
    return replies


def tokens(text: str, **last: Any) -> list[Token]:
    *most, end = [Token(KEY, 0, token_id) for token_id in ids(text)]
    return [*most, Token(end.key, end.epoch, end.token_id, **last)]


def told_by(replies: Replies, pushed: list[Token]) -> list[TokenDelta]:
    """What one step says, in order. Texts are of requests from `open_framed`."""
    deltas, texts = replies.tell(pushed)
    assert len({text.number for text in texts}) == len(texts), "a request has two of them"
    keys = {token.key[0]: token.key for token in pushed}
    return [text.whole(keys[text.number], 0) for text in texts] + deltas


def run(replies: Replies, pushed: list[Token]) -> list[tuple[str, str | None, str | int | None]]:
    """Each delta's text, finish and stop reason, one step per token."""
    deltas = [delta for token in pushed for delta in told_by(replies, [token])]
    return [(delta.text, delta.finish_reason, delta.stop_reason) for delta in deltas]


def test_text_comes_in_whole_characters() -> None:
    assert run(open_reply(), tokens("aé", finish_reason="length")) == [
        ("a", None, None),
        ("", None, None),
        ("é", "length", None),
    ]


def test_a_resumed_request_goes_on_where_it_stopped() -> None:
    assert run(open_reply(sent="so fa"), tokens("r", finish_reason="length")) == [("r", "length", None)]


def test_a_stop_string_ends_it_and_is_not_shown() -> None:
    replies = open_reply(stop=("STOP",))
    told = run(replies, tokens("a STOP and more"))
    assert "".join(text for text, *_ in told) == "a "
    assert told[-1][1:] == ("stop", "STOP")
    assert len(told) == len("a STOP"), "tokens behind it are nobody's"
    assert len(replies) == 0


def test_an_unfinished_stop_string_is_shown_at_the_end() -> None:
    told = run(open_reply(stop=("STOP",)), tokens("a ST", finish_reason="length"))
    assert "".join(text for text, *_ in told) == "a ST"


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_token_is_counted_but_shown_only_if_asked(include: bool) -> None:
    replies = open_reply(include_stop_str_in_output=include)
    token = Token(KEY, 0, ids("!")[0], finish_reason="stop", stop_reason=33)
    [delta] = told_by(replies, [token])
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("!" if include else "", [token.token_id], 33)


def test_end_of_sequence() -> None:
    replies = open_reply()
    told_by(replies, tokens("a"))
    [delta] = told_by(replies, [Token(KEY, 0, END, finish_reason="stop")])
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("", "stop", None)
    assert len(replies) == 0


def test_prefill_has_one_token_to_say() -> None:
    replies = open_reply("prefill")
    assert [delta.text for delta in told_by(replies, tokens("a"))] == ["a"]
    assert len(replies) == 0


def test_an_engines_error_is_passed_on_and_logged_with_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    failed = Token(KEY, 0, -1, finish_reason="error", error="no such id", is_refusal=True)
    [delta] = told_by(open_reply(), [failed])
    assert (delta.finish_reason, delta.error, delta.is_refusal) == ("error", "no such id", True)
    [record] = caplog.records
    assert (record.message, vars(record)["trace_id"]) == ("request failed", TRACEPARENT[3:35])


def test_cancelled_requests_are_silent() -> None:
    replies = open_reply()
    replies.close(KEY, 0)
    replies.close(KEY, 0)
    assert told_by(replies, tokens("late")) == []
    other_attempt = Token(KEY, 1, ids("a")[0])
    assert told_by(open_reply(), [other_attempt]) == []


def test_text_goes_out_as_events_where_there_is_a_frame() -> None:
    replies = open_framed(sent="a")
    deltas = [delta for token in tokens('"é', finish_reason="length") for delta in told_by(replies, [token])]
    assert [delta.frames for delta in deltas] == [
        b'data: {"text":"\\""}\n\n',
        b"",
        'data: {"text":"é"}\n\n'.encode(),
    ]
    assert [delta.num_chars for delta in deltas] == [1, 0, 1]
    assert not any(delta.text for delta in deltas)


@pytest.mark.parametrize("about_the_prompt", [{"cached_tokens": 5}, {"admitted_at": 1.0}])
def test_a_token_that_is_only_text_is_told_briefly(about_the_prompt: dict[str, Any]) -> None:
    replies = open_framed()
    first, second, last = tokens("abc", finish_reason="length")
    first = msgspec.structs.replace(first, **about_the_prompt)
    assert replies.tell([first])[1] == []
    assert replies.tell([second]) == ([], [TextDelta(KEY[0], second.token_id, FRAME.chunk("b"), 1)])
    assert replies.tell([last])[1] == []
    assert open_reply().tell([second])[1] == [], "a reader wants the text itself"


@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=12))
def test_the_tokens_of_a_step_stay_in_order(step: list[tuple[int, bool, bool]]) -> None:
    """Also where a request has several of them, some of which say more than text."""
    replies = Replies(byte_level())
    for number in range(3):
        open_framed(key=bytes([number]), replies=replies)
    expected: dict[int, list[int]] = {}
    pushed, ended = [], set()
    for place, (number, is_first, is_last) in enumerate(step):
        token_id = ids("abcdefghijkl"[place])[0]
        finish: FinishReason | None = "length" if is_last else None
        pushed.append(Token(bytes([number]), 0, token_id, finish, cached_tokens=1 if is_first else None))
        if number not in ended:
            expected.setdefault(number, []).append(token_id)
        if is_last:
            ended.add(number)
    got: dict[int, list[int]] = {}
    for delta in told_by(replies, pushed):
        got.setdefault(delta.key[0], []).extend(delta.token_ids)
    assert got == expected
