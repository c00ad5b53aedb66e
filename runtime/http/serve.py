"""Serves one generation request: prepares it, runs it on the backend, answers whole or as a stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
from msgspec import UNSET

from dynrt.runtime.errors import OverloadedError
from dynrt.runtime.http.backend import Backend
from dynrt.runtime.http.choices import (
    joined,
    outputs_of,
    requests_for_choices,
    unfinished,
    with_own_ids,
    without_token,
)
from dynrt.runtime.http.envelope import told_to_client
from dynrt.runtime.http.openai.replies import MakeReply, Reply, Shown, finish_word
from dynrt.runtime.http.parameters.shared import Parameters
from dynrt.runtime.http.request import Request
from dynrt.runtime.http.request_record import RequestRecord
from dynrt.runtime.http.response import Response, json_response
from dynrt.runtime.http.sse import OPENAI_ENDING, Ending, EventStream
from dynrt.runtime.http.transport.connection import ClientLeftError
from dynrt.runtime.messages import SamplingParams
from dynrt.runtime.requests import GenerateOutput, GenerateRequest, ModelCard


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


Prepare = Callable[[Request], Awaitable[Job]]


def make_job(
    request: Request,
    asked: Parameters,
    card: ModelCard,
    prompts: Sequence[tuple[bytes, SamplingParams]],
    make_reply: MakeReply,
) -> Job:
    """The job for `prompts` (packed ids), as asked."""
    record = request.record
    requests = []
    for prompt_ids, sampling in prompts:
        record.prompt_tokens += len(prompt_ids) // 4
        one = _generate_request(request, asked, card, prompt_ids, sampling)
        requests += [one] if asked.n == 1 else requests_for_choices(one, asked.n)
    return Job(
        requests=with_own_ids(requests),
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
    request: Request, asked: Parameters, card: ModelCard, prompt_ids: bytes, sampling: SamplingParams
) -> GenerateRequest:
    record = request.record
    return GenerateRequest(
        prompt_ids=prompt_ids,
        sampling=sampling,
        model=card.name,
        request_id=record.request_id,
        salt=asked.salt,
        priority=asked.priority,
        seeded=asked.seeded,
        traceparent=record.traceparent,
        operation="text_completion" if request.route == "/v1/completions" else "chat",
        local_prefill=asked.local_prefill,
    )


async def serve(request: Request, prepare: Prepare, ending: Ending = OPENAI_ENDING) -> Response | None:
    """Answer `request`. Until a stream's first event is out, errors are raised; then they end the stream."""
    endpoint, stream = request.endpoint, None
    try:
        with endpoint.open_requests.admit(request.connection.task):
            if endpoint.backend.draining():
                raise OverloadedError("the server is draining and takes no new requests; try again later")
            job = await prepare(request)
            if not job.stream:
                return await _collect(job, endpoint.backend, request.record)
            with EventStream(request, ending) as stream:
                await _stream(job, endpoint.backend, request.record, stream)
    except ClientLeftError:
        request.record.outcome = "client_left"
    except Exception as error:
        if stream is None or not stream.started:
            raise
        await _fail(request.record, stream, error)
    return None


def _framed(job: Job) -> list[GenerateRequest]:
    """Its requests, with the frames of their events where the engines can make these."""
    if job.continuous_usage:
        return job.requests
    return [
        msgspec.structs.replace(request, frame=job.reply.frame(index))
        for index, request in enumerate(job.requests)
    ]


async def _collect(job: Job, backend: Backend, record: RequestRecord) -> Response:
    outputs_of_job = _output_of_one if len(job.requests) == 1 else _outputs_of_all
    whole = await outputs_of_job(job, backend, record)
    sampling = job.requests[0].sampling
    if (
        sampling.logprobs is not None or sampling.prompt_logprobs is not None
    ):  # thousands of entries take long
        return await asyncio.to_thread(lambda: json_response(job.reply.whole(whole, record.usage())))
    return json_response(job.reply.whole(whole, record.usage()))


async def _output_of_one(job: Job, backend: Backend, record: RequestRecord) -> list[GenerateOutput]:
    """As `_outputs_of_all`, without what several choices need: most requests have one."""
    parts = []
    outputs = backend.generate(job.requests[0])
    try:
        async for output in outputs:
            told = without_token(output) if job.only_echo else output
            record.count(told, 0)
            parts.append(told)
            if told.finish_reason is not None:
                return [joined(parts)]
    finally:
        await outputs.aclose()
    raise unfinished()


async def _outputs_of_all(job: Job, backend: Backend, record: RequestRecord) -> list[GenerateOutput]:
    """What each choice came to."""
    of_choices: list[list[GenerateOutput]] = [[] for _ in job.requests]
    async with outputs_of(backend, job.requests, job.choices_per_prompt) as outputs:
        async for index, output in outputs:
            told = without_token(output) if job.only_echo else output
            record.count(told, index // job.choices_per_prompt)
            finish_word(told)  # a choice that failed fails the request at once
            of_choices[index].append(told)
    return [joined(parts) for parts in of_choices]


async def _stream(job: Job, backend: Backend, record: RequestRecord, events: EventStream) -> None:
    begun = [False] * len(job.requests)
    left = len(job.requests)
    async with outputs_of(backend, _framed(job), job.choices_per_prompt, events.outflow) as outputs:
        async for index, output in outputs:
            events.count_taken()
            told = without_token(output) if job.only_echo else output
            record.count(told, index // job.choices_per_prompt)
            usage = record.usage() if job.continuous_usage else UNSET
            tell = partial(job.reply.events, index, told, first=not begun[index], usage=usage)
            news = tell() if told.prompt_logprobs is None else await asyncio.to_thread(tell)
            begun[index] = True
            left -= told.finish_reason is not None
            if left == 0:
                last = job.reply.usage_event(record.usage()) if job.include_usage else b""
                await events.finish(news + last)
            elif news:
                await events.send(news)


async def _fail(record: RequestRecord, events: EventStream, error: Exception) -> None:
    """End a started stream with `error`, for whoever still reads it."""
    record.outcome = "failed"
    try:
        await events.fail(told_to_client(error, record.request_id))
    except ClientLeftError:
        record.outcome = "client_left"
