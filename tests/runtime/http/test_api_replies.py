"""Answers in the shapes of Responses and Messages: whole, and as events that tell the same."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from scripted_backend import CharacterTokens

from dynrt.runtime.http.answers.answer import AnswerPlan, ReasoningPlan
from dynrt.runtime.http.answers.reasoning.formats import REASONING_FORMATS
from dynrt.runtime.http.answers.tools.hermes import HermesParser
from dynrt.runtime.http.anthropic.reply import MessagesReply
from dynrt.runtime.http.openai.types import PromptTokensDetails, Usage
from dynrt.runtime.http.responses.reply import ResponsesReply
from dynrt.runtime.http.responses.types import Echo
from dynrt.runtime.requests import GenerateOutput

USAGE = Usage(5, 4, 9, PromptTokensDetails(3))
ARGUMENTS = '{"a": 1}'
TEXT = f'<think>Hm.</think>So:\n<tool_call>{{"name": "add", "arguments": {ARGUMENTS}}}</tool_call>\n'


def plan(**more: Any) -> AnswerPlan:
    ids = iter(["call_0", "call_1", "call_2"])
    reasoning = ReasoningPlan(REASONING_FORMATS["qwen3"], "", CharacterTokens())  # type: ignore[arg-type]
    return AnswerPlan(lambda: next(ids), reasoning, lambda: HermesParser(["add"]), **more)


def messages_reply(**more: Any) -> MessagesReply:
    return MessagesReply("msg_1", "m", plan(**more))


def responses_reply(**more: Any) -> ResponsesReply:
    return ResponsesReply("resp_1", 7, "m", plan(**more), Echo(instructions="Be brief."))


def outputs(text: str, finish: Any = "stop", stop_reason: Any = None) -> list[GenerateOutput]:
    """One character at a time."""
    return [
        *[GenerateOutput([1], character) for character in text],
        GenerateOutput([2], "", finish, stop_reason),
    ]


def streamed(reply: MessagesReply | ResponsesReply, parts: list[GenerateOutput]) -> list[dict[str, Any]]:
    """The data of all events, whose names are their types."""
    news = [reply.events(0, part, first=index == 0, usage=USAGE) for index, part in enumerate(parts)]
    told = []
    for event in b"".join([*news, reply.usage_event(USAGE)]).decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        told.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {told[-1]['type']}"
    return told


def whole(
    reply: MessagesReply | ResponsesReply, text: str, finish: Any = "stop", stop_reason: Any = None
) -> Any:
    return json.loads(
        msgspec.json.encode(reply.whole([GenerateOutput([1], text, finish, stop_reason)], USAGE))
    )


CONTENT = [
    {"type": "thinking", "thinking": "Hm.", "signature": ""},
    {"type": "text", "text": "So:"},
    {"type": "tool_use", "id": "call_0", "name": "add", "input": {"a": 1}},
]


def test_a_message() -> None:
    message = whole(messages_reply(), TEXT)
    assert message == {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": CONTENT,
        "stop_reason": "tool_use",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 2,
            "cache_read_input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "output_tokens": 4,
        },
    }


def test_a_message_in_events() -> None:
    start, ping, *events, end, stop = streamed(messages_reply(), outputs(TEXT))
    assert start["type"] == "message_start" and start["message"]["content"] == []
    assert start["message"]["usage"]["input_tokens"] == 2
    assert (ping["type"], stop["type"]) == ("ping", "message_stop")
    assert end["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == 4
    blocks: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append({**event["content_block"], "parts": []})
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                blocks[-1]["parts"].append(event["delta"])
            case "content_block_stop":
                assert event["index"] == len(blocks) - 1
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use"]
    assert "".join(part["thinking"] for part in blocks[0]["parts"]) == "Hm."
    assert "".join(part["text"] for part in blocks[1]["parts"]) == "So:"
    assert (blocks[2]["id"], blocks[2]["name"], blocks[2]["input"]) == ("call_0", "add", {})
    assert "".join(part["partial_json"] for part in blocks[2]["parts"]) == ARGUMENTS
    assert [event["type"] for event in events].count("content_block_stop") == 3


@pytest.mark.parametrize(
    ("text", "finish", "stop_reason", "told"),
    [
        ("So", "stop", None, ("end_turn", None)),
        ("So", "stop", 7, ("end_turn", None)),
        ("So", "stop", "END", ("stop_sequence", "END")),
        (TEXT, "length", None, ("max_tokens", None)),
    ],
)
def test_why_a_message_ends(
    text: str, finish: str, stop_reason: object, told: tuple[str, str | None]
) -> None:
    message = whole(messages_reply(), text, finish, stop_reason)
    assert (message["stop_reason"], message["stop_sequence"]) == told


def test_arguments_that_are_broken_off_are_none() -> None:
    [block] = whole(messages_reply(), '<tool_call>{"name": "add", "arguments": {"a', "length")["content"]
    assert block["input"] == {}


def test_an_empty_message() -> None:
    assert whole(messages_reply(), "")["content"] == []


OUTPUT = [
    {
        "type": "reasoning", "id": "rs_1_0", "status": "completed", "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    },
    {
        "type": "message", "id": "msg_1_1", "status": "completed", "role": "assistant",
        "content": [{"type": "output_text", "text": "So:", "annotations": [], "logprobs": []}],
    },
    {
        "type": "function_call", "id": "fc_1_2", "status": "completed", "call_id": "call_0", "name": "add",
        "arguments": ARGUMENTS,
    },
]  # fmt: skip


def test_a_response() -> None:
    response = whole(responses_reply(), TEXT)
    assert response["object"] == "response" and response["status"] == "completed"
    assert (response["id"], response["created_at"], response["model"]) == ("resp_1", 7, "m")
    assert response["output"] == OUTPUT and response["instructions"] == "Be brief."
    assert response["usage"] == {
        "input_tokens": 5, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
        "output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 9,
    }  # fmt: skip
    assert response["store"] is False and response["incomplete_details"] is None


def test_a_response_that_is_cut_off() -> None:
    response = whole(responses_reply(), "So", "length")
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == ["incomplete"]
    *_, end = streamed(responses_reply(), outputs("So", "length"))
    assert end["type"] == "response.incomplete"


def test_a_response_in_events() -> None:
    created, in_progress, *events, completed = streamed(responses_reply(), outputs(TEXT))
    assert (created["type"], in_progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["status"] == "in_progress" and created["response"]["output"] == []
    assert completed["type"] == "response.completed" and completed["response"]["output"] == OUTPUT
    numbers = [event["sequence_number"] for event in (created, in_progress, *events, completed)]
    assert numbers == list(range(len(numbers)))
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == OUTPUT
    for name, text in (
        ("reasoning_text", "Hm."),
        ("output_text", "So:"),
        ("function_call_arguments", ARGUMENTS),
    ):
        of_it = [event for event in events if event["type"].startswith(f"response.{name}.")]
        *deltas, done = of_it
        assert "".join(delta["delta"] for delta in deltas) == text
        assert text in (done.get("text"), done.get("arguments"))
        assert len({(event["item_id"], event["output_index"]) for event in of_it}) == 1


def test_only_the_first_call_is_told_where_one_is_wanted() -> None:
    twice = TEXT + TEXT.removeprefix("<think>Hm.</think>So:")
    assert len(whole(responses_reply(), twice)["output"]) == 4
    assert len(whole(responses_reply(parallel_calls=False), twice)["output"]) == 3
