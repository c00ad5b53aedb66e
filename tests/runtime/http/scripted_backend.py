"""A backend that plays a script, and a raw connection to look at bytes: support for the endpoint's tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterable
from typing import Any, ClassVar

from dynrt.runtime.frame_sink import FrameSink
from dynrt.runtime.http_counts import HttpCounts
from dynrt.runtime.messages import FinishReason, TokenLogprob, pack_ids, unpack_ids
from dynrt.runtime.requests import GenerateOutput, GenerateRequest, ModelCard, TokenizerInfo

DEADLINE_S = 10.0
MODEL = "acme/tiny"
CONTEXT = 64
VOCAB = 1000
END = 990
HALVES = (991, 992)

Step = GenerateOutput | Exception | asyncio.Event


class CharacterTokens(dict[int, bytes]):
    """Tokens are characters, but for one that ends texts and two that are halves of a character."""

    special_tokens: ClassVar = {END: "<|end|>"}
    drops_first_space = False

    def __missing__(self, token_id: int) -> bytes:
        halves = dict(zip(HALVES, ("é".encode()[:1], "é".encode()[1:]), strict=True))
        return b"" if token_id == END else halves.get(token_id, chr(token_id).encode())


class ScriptedBackend:
    """`script`: outputs to yield, exceptions to raise, events to wait for. A text's tokens are its characters."""

    def __init__(self) -> None:
        self.script: Iterable[Step] = [
            GenerateOutput([1], "Hel", cached_tokens=2),
            GenerateOutput([2, 3], "lo"),
            GenerateOutput([4], "", "stop"),
        ]
        self.requests: list[GenerateRequest] = []
        self.chats: list[tuple[list[dict[str, Any]], dict[str, bool], dict[str, Any]]] = []
        self.entered = asyncio.Event()  # a generation is at its first step
        self.closed = asyncio.Event()  # a generation has been left
        self.may_close = asyncio.Event()  # clear it to keep generations busy with their end
        self.may_close.set()
        self.closings: asyncio.Queue[str] = asyncio.Queue()  # the request ids of those
        self.cards = [ModelCard(MODEL, created=7, context_length=CONTEXT, vocab_size=VOCAB)]
        self.why_not_ready: str | None = None
        self.is_draining = False
        self.http_counts: list[HttpCounts] = []

    async def generate(
        self, request: GenerateRequest, sink: FrameSink | None = None
    ) -> AsyncGenerator[GenerateOutput, None]:
        self.requests.append(request)
        self.entered.set()
        try:
            for step in self.script:
                if isinstance(step, asyncio.Event):
                    await step.wait()
                elif isinstance(step, Exception):
                    raise step
                else:
                    yield step
        finally:
            await self.may_close.wait()
            self.closed.set()
            self.closings.put_nowait(request.request_id)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> bytes:
        return pack_ids([ord(char) % VOCAB for char in text])

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> bytes:
        ends = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        self.chats.append((messages, ends, template_kwargs or {}))
        contents = [message.get("content") for message in messages]
        return await self.encode("".join(text if isinstance(text, str) else "x" for text in contents))

    async def decode(self, token_ids: bytes, *, skip_special_tokens: bool = True) -> str:
        return "".join(self.token_bytes()[token_id].decode() for token_id in unpack_ids(token_ids))

    def token_bytes(self) -> CharacterTokens:
        return CharacterTokens()

    async def token_names(self, token_ids: bytes) -> list[str]:
        return [chr(token_id) for token_id in unpack_ids(token_ids)]

    def tokenizer_info(self) -> TokenizerInfo:
        return TokenizerInfo(VOCAB, None, "<|end|>", None, None, "{{ messages }}")

    def models(self) -> list[ModelCard]:
        return self.cards

    def ready(self) -> str | None:
        return self.why_not_ready

    def draining(self) -> bool:
        return self.is_draining

    def count_http(self, counts: HttpCounts) -> None:
        self.http_counts.append(counts)

    async def metrics(self) -> bytes:
        return b"dynrt_up 1\n"


def chat(content: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], **fields}


def text(prompt: Any = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, **fields}


def scored(
    token_ids: list[int], text: str, finish: FinishReason | None = None, *, prompt: list[int] | None = None
) -> GenerateOutput:
    """An output with log probabilities: -0.5 of each token, of which `Z` was likelier. `prompt`: its ids, likewise."""
    entries = [TokenLogprob(token_id, -0.5, [(ord("Z"), -0.25), (token_id, -0.5)]) for token_id in token_ids]
    of_prompt = None
    if prompt is not None:
        of_prompt = [None, *(TokenLogprob(token_id, -1.0, [(token_id, -1.0)]) for token_id in prompt[1:])]
    return GenerateOutput(token_ids, text, finish, logprobs=entries, prompt_logprobs=of_prompt)


def http_request(
    path: str, body: Any, *headers: str, version: str = "1.1", content_type: str | None = "application/json"
) -> bytes:
    """The bytes of a POST; `body` is sent as it is if it is bytes, else as JSON."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/{version}", "Host: test", f"Content-Length: {len(raw)}", *headers]
    if content_type is not None:
        lines.append(f"Content-Type: {content_type}")
    return "\r\n".join([*lines, "", ""]).encode() + raw


class RawConnection:
    """A TCP connection on which every read has a deadline."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def abort(self) -> None:
        self.writer.transport.abort()

    async def until(self, marker: bytes) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self._reader.readuntil(marker)

    async def rest(self) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self._reader.read()

    async def response(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers with lower-case names, and the body of one response that has a Content-Length."""
        status_line, *lines = (await self.until(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        headers = dict(line.lower().split(": ", 1) for line in lines)
        async with asyncio.timeout(DEADLINE_S):
            body = await self._reader.readexactly(int(headers["content-length"]))
        return int(status_line.split()[1]), headers, body


def events_of(stream: bytes) -> list[Any]:
    """The data of a stream's events, JSON decoded; comments are left out, [DONE] stays a string."""
    blocks = stream.decode().split("\n\n")
    assert blocks.pop() == "", "a stream ends with a whole event"
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    return [one if one == "[DONE]" else json.loads(one) for one in data]
