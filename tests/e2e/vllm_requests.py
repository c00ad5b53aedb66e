"""Kinds of requests that dynrt over vLLM engines and vLLM's own server answer alike: name, path and body."""

from __future__ import annotations

from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

GREEDY = {"temperature": 0, "max_tokens": 20, "return_token_ids": True}
DRAWN = {**GREEDY, "temperature": 0.9, "seed": 7, "ignore_eos": True}
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
CONVERSATION = [
    {"role": "system", "content": "You answer in one word."},
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "Name another one."},
]
STORY = "Once upon a time, in a village by the sea, there lived"
LONG = " ".join(f"Chapter {number} tells of ship {number * 7}." for number in range(60))  # several chunks
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "in_europe": {"type": "boolean"}},
    "required": ["city", "in_europe"],
    "additionalProperties": False,
}
YES_OR_NO = 'root ::= "yes" | "no"'


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": STORY, **GREEDY, **fields}


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": QUESTION, **GREEDY, **fields}


REQUESTS = {
    "greedy": completion(),
    "token ids as the prompt": completion(prompt=list(range(1000, 1100))),
    "a prompt of several chunks": completion(prompt=LONG),
    "past the end of sequence": completion(ignore_eos=True, max_tokens=40),
    "at least so many tokens": completion(min_tokens=15, stop=[" the", ","]),
    "one token": completion(max_tokens=1),
    "log probabilities": completion(logprobs=3),
    "log probabilities of none but the chosen": completion(logprobs=0),
    "log probabilities of the prompt": completion(prompt_logprobs=2),
    "echo": completion(echo=True, return_token_ids=False),
    "echo with log probabilities": completion(echo=True, logprobs=2, return_token_ids=False),
    "a stop string": completion(stop=["village"], max_tokens=40),
    "several stop strings": completion(stop=["!", " named", " who"], max_tokens=40),
    "a stop string that is told": completion(stop=[" a "], include_stop_str_in_output=True, max_tokens=40),
    "a stop token": completion(stop_token_ids=[28, 30], max_tokens=40),
    "seed": completion(**{**DRAWN, "seed": 1}),
    "another seed": completion(**DRAWN),
    "top p": completion(**DRAWN, top_p=0.8),
    "top k": completion(**DRAWN, top_k=20),
    "min p": completion(**DRAWN, min_p=0.1),
    "drawn with log probabilities": completion(**DRAWN, logprobs=2),
    "presence penalty": completion(presence_penalty=1.5),
    "frequency penalty": completion(frequency_penalty=1.5, max_tokens=40),
    "repetition penalty": completion(repetition_penalty=1.3),
    "logit bias": completion(logit_bias={"28": -100, "260": 3}),
    "a choice": completion(structured_outputs={"choice": ["sailor", "miller"]}),
    "a regular expression": completion(structured_outputs={"regex": " [a-z]{3,8} [0-9]{2}"}),
    "a grammar": completion(structured_outputs={"grammar": YES_OR_NO}),
    "a schema": completion(structured_outputs={"json": SCHEMA}, max_tokens=60),
    "a schema, drawn": completion(**DRAWN | {"max_tokens": 60}, structured_outputs={"json": SCHEMA}),
    "chat": chat(),
    "a conversation": chat(messages=CONVERSATION),
    "chat, log probabilities": chat(logprobs=True, top_logprobs=3),
    "chat, a stop string": chat(stop="Paris"),
    "chat, seed": chat(**DRAWN),
    "chat, max_completion_tokens": chat(max_completion_tokens=5, max_tokens=None),
    "chat, JSON of a schema": chat(
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}},
        max_tokens=60,
    ),
    "chat, an answer that goes on": chat(
        messages=[*QUESTION, {"role": "assistant", "content": "It is"}],
        add_generation_prompt=False,
        continue_final_message=True,
    ),
}
