"""The choices of one request: generated side by side, merged into one stream, ended together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from types import TracebackType
from typing import Protocol, Self

import msgspec

from dynrt.runtime.errors import EngineError
from dynrt.runtime.frame_sink import FrameSink
from dynrt.runtime.http.backend import Backend
from dynrt.runtime.messages import TokenLogprob
from dynrt.runtime.requests import GenerateOutput, GenerateRequest

SHARED_PROMPT_TOKENS = 256  # such prompts' other choices wait until the first has put it into the cache
_INT64_SPAN = 2**64

IndexedOutput = tuple[int, GenerateOutput]
PromptScores = list[TokenLogprob | None] | None


class Outputs(Protocol):
    """Outputs of all choices as (index, output), until each has finished; leaving it ends those that have not."""

    async def __aenter__(self) -> AsyncIterator[IndexedOutput]: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


def requests_for_choices(request: GenerateRequest, choices: int) -> list[GenerateRequest]:
    """`request` once per choice. Choice 0 is what a request for one would get; the others' seeds follow its seed.

    Only choice 0 scores the prompt, for all of them.
    """
    return [_nth_choice(request, number) for number in range(choices)]


def _nth_choice(request: GenerateRequest, number: int) -> GenerateRequest:
    if number == 0:
        return request
    seed = (request.sampling.seed + number + _INT64_SPAN // 2) % _INT64_SPAN - _INT64_SPAN // 2
    sampling = msgspec.structs.replace(request.sampling, seed=seed, prompt_logprobs=None)
    return msgspec.structs.replace(request, sampling=sampling)


def with_own_ids(requests: list[GenerateRequest]) -> list[GenerateRequest]:
    """`requests` of one client's request, told apart in logs by their choice's index if there are several."""
    if len(requests) == 1:
        return requests
    return [
        msgspec.structs.replace(request, request_id=f"{request.request_id}-{index}")
        for index, request in enumerate(requests)
    ]


def outputs_of(
    backend: Backend, requests: Sequence[GenerateRequest], per_prompt: int, sink: FrameSink | None = None
) -> Outputs:
    """`requests`: those of each prompt's `per_prompt` choices behind one another. Raises what any of them raises.

    `sink` is used where there is one request: of several, each is read ahead of what has been written.
    """
    assert requests and len(requests) % per_prompt == 0
    if len(requests) == 1:
        return LoneOutputs(backend.generate(requests[0], sink))
    return MergedOutputs(backend, requests, per_prompt)


class LoneOutputs:
    """See `outputs_of`. Most requests have one choice: it needs no task and no queue."""

    def __init__(self, outputs: AsyncGenerator[GenerateOutput, None]) -> None:
        self._outputs = outputs
        self._has_finished = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._outputs.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> IndexedOutput:
        if self._has_finished:
            raise StopAsyncIteration
        try:
            output = await anext(self._outputs)
        except StopAsyncIteration:
            raise unfinished() from None
        self._has_finished = output.finish_reason is not None
        return 0, output


class MergedOutputs:
    """See `outputs_of`. One task per choice, which waits while the queue is full: one reader paces them all."""

    def __init__(self, backend: Backend, requests: Sequence[GenerateRequest], per_prompt: int) -> None:
        self._backend = backend
        self._requests = requests
        self._per_prompt = per_prompt
        self._queue: asyncio.Queue[IndexedOutput | Exception] = asyncio.Queue(len(requests))
        self._in_cache = [asyncio.Event() for _ in range(len(requests) // per_prompt)]  # by prompt
        self._scores: dict[int, PromptScores] = {}  # likewise
        self._left = len(requests)  # choices that have not finished
        self._group = asyncio.TaskGroup()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._tasks = [self._group.create_task(self._pump(index)) for index in range(len(self._requests))]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(None, None, None)  # the error is the body's to raise, not the group's

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> IndexedOutput:
        if self._left == 0:
            raise StopAsyncIteration
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        self._left -= item[1].finish_reason is not None
        return item

    async def _pump(self, index: int) -> None:
        """Put a choice's outputs into the queue; its failure too, as that is for the reader to raise."""
        try:
            await self._turn(index)
            async with LoneOutputs(self._backend.generate(self._requests[index], None)) as outputs:
                has_begun = False
                async for _, output in outputs:
                    told = output if has_begun else self._first(index, output)
                    has_begun = True
                    await self._queue.put((index, told))
        except Exception as error:
            await self._queue.put(error)

    def _first(self, index: int, output: GenerateOutput) -> GenerateOutput:
        """The first output of a choice, with the prompt's scores."""
        prompt, choice = divmod(index, self._per_prompt)
        if choice > 0:
            return msgspec.structs.replace(output, prompt_logprobs=self._scores.get(prompt))
        self._scores[prompt] = output.prompt_logprobs
        self._in_cache[prompt].set()
        return output

    async def _turn(self, index: int) -> None:
        """A long prompt, or one to be scored, is computed once: its other choices then find it in the cache."""
        prompt, choice = divmod(index, self._per_prompt)
        first = self._requests[index - choice]
        is_shared = len(first.prompt_ids) >= 4 * SHARED_PROMPT_TOKENS
        if choice > 0 and (is_shared or first.sampling.prompt_logprobs is not None):
            await self._in_cache[prompt].wait()


def joined(parts: Sequence[GenerateOutput]) -> GenerateOutput:
    """All outputs of one choice as one."""
    if len(parts) == 1:
        return parts[0]
    logprobs = [logprob for part in parts for logprob in part.logprobs or ()]
    last = parts[-1]
    return GenerateOutput(
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        text="".join([part.text for part in parts]),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        cached_tokens=last.cached_tokens,
        logprobs=logprobs or None,
        prompt_logprobs=parts[0].prompt_logprobs,
    )


def without_token(output: GenerateOutput) -> GenerateOutput:
    """`output` of a request for no tokens, without the one that engines make: nothing of it is told or counted."""
    finish = "length" if output.finish_reason in ("stop", "length") else output.finish_reason
    return msgspec.structs.replace(
        output, token_ids=[], text="", logprobs=None, finish_reason=finish, stop_reason=None
    )


def unfinished() -> EngineError:
    return EngineError("the engine's output ended without a finish reason")
