"""Serves one generation request: prepares it, runs it on the backend, answers whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial

import msgspec
from aiohttp import web
from msgspec import UNSET

from dynrt.runtime.errors import OverloadedError
from dynrt.runtime.http.backend import BACKEND, Backend
from dynrt.runtime.http.choices import (
    IndexedOutput,
    joined,
    outputs_of,
    requests_for_choices,
    with_own_ids,
    without_tokens,
)
from dynrt.runtime.http.envelope import told_to_client
from dynrt.runtime.http.models import json_response
from dynrt.runtime.http.open_requests import OPEN_REQUESTS
from dynrt.runtime.http.openai.replies import MakeReply, Reply, Shown, finish_word
from dynrt.runtime.http.parameters.shared import Parameters
from dynrt.runtime.http.request_record import RequestRecord, record_of
from dynrt.runtime.http.sse import OPENAI_ENDING, ClientLeftError, Ending, EventStream
from dynrt.runtime.messages import SamplingParams
from dynrt.runtime.requests import GenerateOutput, GenerateRequest, ModelCard, Operation


class Job(msgspec.Struct, frozen=True):
    """A request that has passed the door: what to generate and how to answer.

    `requests`: by choice, those of one prompt behind one another.
    """

    requests: list[GenerateRequest]
    choices_per_prompt: int
    reply: Reply
    only_echo: bool  # the one token that engines make at least is not told
    stream: bool
    include_usage: bool
    continuous_usage: bool


Prepare = Callable[[web.Request], Awaitable[Job]]


def make_job(
    request: web.Request,
    asked: Parameters,
    card: ModelCard,
    prompts: Sequence[tuple[bytes, SamplingParams]],
    make_reply: MakeReply,
) -> Job:
    """The job for `prompts` (packed ids), as asked."""
    record = record_of(request)
    record.prompt_tokens = sum([len(prompt_ids) for prompt_ids, _ in prompts]) // 4
    operation: Operation = "text_completion" if request.path == "/v1/completions" else "chat"
    one_each = [_generate_request(record, operation, asked, card, *prompt) for prompt in prompts]
    return Job(
        requests=with_own_ids([choice for one in one_each for choice in requests_for_choices(one, asked.n)]),
        choices_per_prompt=asked.n,
        reply=make_reply(record.request_id, int(time.time()), card.name),
        only_echo=asked.max_tokens == 0,
        stream=asked.stream,
        include_usage=asked.include_usage,
        continuous_usage=asked.continuous_usage,
    )


def shown(asked: Parameters, backend: Backend, logprobs: int | None) -> Shown:
    """What is asked to be told beside the text; `logprobs`: as read_parameters takes them."""
    needs_vocabulary = logprobs is not None or asked.prompt_logprobs is not None
    return Shown(
        vocabulary=backend.token_bytes() if needs_vocabulary else None,
        logprobs=logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        token_ids=asked.shows_token_ids,
    )


def _generate_request(
    record: RequestRecord,
    operation: Operation,
    asked: Parameters,
    card: ModelCard,
    prompt_ids: bytes,
    sampling: SamplingParams,
) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids=prompt_ids,
        sampling=sampling,
        model=card.name,
        request_id=record.request_id,
        salt=asked.salt,
        priority=asked.priority,
        seeded=asked.seeded,
        traceparent=record.traceparent,
        operation=operation,
        local_prefill=asked.local_prefill,
    )


async def serve(request: web.Request, prepare: Prepare, ending: Ending = OPENAI_ENDING) -> web.StreamResponse:
    """Answer `request`. Until a stream's first event is out, errors are raised; then they end the stream."""
    with EventStream(request, ending) as events:
        try:
            return await _run(request, prepare, events)
        except ClientLeftError:
            record_of(request).outcome = "client_left"
        except Exception as error:
            if not events.started:
                raise
            await _fail(request, events, error)
        return events.response


async def _run(request: web.Request, prepare: Prepare, events: EventStream) -> web.StreamResponse:
    app = request.app
    backend = app[BACKEND]
    record = record_of(request)
    with app[OPEN_REQUESTS].admit():
        if backend.draining():
            raise OverloadedError("the server is draining and takes no new requests; try again later")
        job = await prepare(request)
        async with outputs_of(backend, _framed(job), job.choices_per_prompt, events.outflow) as outputs:
            told = without_tokens(outputs) if job.only_echo else outputs
            if not job.stream:
                return await _collect(job, told, record)
            await _stream(job, told, record, events)
            return events.response


def _framed(job: Job) -> list[GenerateRequest]:
    """Its requests, with the frames of their events where the engines can make these."""
    if not job.stream or job.continuous_usage:
        return job.requests
    return [
        msgspec.structs.replace(request, frame=job.reply.frame(index))
        for index, request in enumerate(job.requests)
    ]


async def _collect(job: Job, outputs: AsyncIterator[IndexedOutput], record: RequestRecord) -> web.Response:
    of_choices: list[list[GenerateOutput]] = [[] for _ in job.requests]
    async for index, output in outputs:
        record.count(output, index // job.choices_per_prompt)
        finish_word(output)  # a choice that failed fails the request at once
        of_choices[index].append(output)
    whole = [joined(parts) for parts in of_choices]
    if any(output.logprobs or output.prompt_logprobs for output in whole):  # thousands of entries take long
        return await asyncio.to_thread(lambda: json_response(job.reply.whole(whole, record.usage())))
    return json_response(job.reply.whole(whole, record.usage()))


async def _stream(
    job: Job, outputs: AsyncIterator[IndexedOutput], record: RequestRecord, events: EventStream
) -> None:
    begun = [False] * len(job.requests)
    left = len(job.requests)
    async for index, output in outputs:
        events.count_taken()
        record.count(output, index // job.choices_per_prompt)
        usage = record.usage() if job.continuous_usage else UNSET
        tell = partial(job.reply.events, index, output, first=not begun[index], usage=usage)
        news = tell() if output.prompt_logprobs is None else await asyncio.to_thread(tell)
        begun[index] = True
        left -= output.finish_reason is not None
        if left == 0:
            last = job.reply.usage_event(record.usage()) if job.include_usage else b""
            await events.finish(news + last)
        elif news:
            await events.send(news)


async def _fail(request: web.Request, events: EventStream, error: Exception) -> None:
    """End a started stream with `error`, for whoever still reads it."""
    record = record_of(request)
    record.outcome = "failed"
    try:
        await events.fail(told_to_client(error, record.request_id))
    except ClientLeftError:
        record.outcome = "client_left"
