"""Serves one generation request: prepares it, runs it on the backend, answers whole or as a stream."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

import msgspec
from aiohttp import web
from msgspec import UNSET

from dynrt.runtime.errors import EngineError, OverloadedError
from dynrt.runtime.http.backend import BACKEND
from dynrt.runtime.http.envelope import told_to_client
from dynrt.runtime.http.models import json_response
from dynrt.runtime.http.open_requests import OPEN_REQUESTS
from dynrt.runtime.http.parameters import Parameters
from dynrt.runtime.http.replies import ChatReply, Reply, TextReply, finish_word
from dynrt.runtime.http.request_record import RequestRecord, record_of
from dynrt.runtime.http.sse import ClientLeftError, EventStream
from dynrt.runtime.messages import SamplingParams
from dynrt.runtime.requests import GenerateOutput, GenerateRequest, ModelCard

_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Job(msgspec.Struct, frozen=True):
    """A request that has passed the door: what to generate and how to answer."""

    request: GenerateRequest
    reply: Reply
    stream: bool
    include_usage: bool
    continuous_usage: bool


Prepare = Callable[[web.Request], Awaitable[Job]]


def make_job(
    request: web.Request,
    asked: Parameters,
    card: ModelCard,
    prompt_ids: bytes,
    sampling: SamplingParams,
    reply: type[ChatReply] | type[TextReply],
) -> Job:
    """The job for `prompt_ids` (packed), as asked."""
    record = record_of(request)
    record.prompt_tokens = len(prompt_ids) // 4
    traceparent = request.headers.get("traceparent", "")
    return Job(
        request=GenerateRequest(
            prompt_ids=prompt_ids,
            sampling=sampling,
            model=card.name,
            request_id=record.request_id,
            salt=asked.salt,
            seeded=asked.seeded,
            traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
            local_prefill=asked.local_prefill,
        ),
        reply=reply(f"{reply.ID_PREFIX}-{record.request_id}", int(time.time()), card.name),
        stream=asked.stream,
        include_usage=asked.include_usage,
        continuous_usage=asked.continuous_usage,
    )


async def serve(request: web.Request, prepare: Prepare) -> web.StreamResponse:
    """Answer `request`. Until a stream's first event is out, errors are raised; then they end the stream."""
    async with EventStream(request) as events:
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
    backend = request.app[BACKEND]
    record = record_of(request)
    async with request.app[OPEN_REQUESTS].admit():
        if backend.draining():
            raise OverloadedError("the server is draining and takes no new requests; try again later")
        job = await prepare(request)
        async with aclosing(backend.generate(job.request)) as outputs:
            if not job.stream:
                return json_response(await _collect(job, outputs, record))
            await _stream(job, outputs, record, events)
            return events.response


async def _collect(job: Job, outputs: AsyncIterator[GenerateOutput], record: RequestRecord) -> msgspec.Struct:
    text: list[str] = []
    async for output in outputs:
        record.count(output)
        text.append(output.text)
        if finish_word(output) is not None:
            return job.reply.whole("".join(text), output, record.usage())
    raise _unfinished()


async def _stream(
    job: Job, outputs: AsyncIterator[GenerateOutput], record: RequestRecord, events: EventStream
) -> None:
    async for output in outputs:
        record.count(output)
        usage = record.usage() if job.continuous_usage else UNSET
        news = job.reply.events(output, first=not events.started, usage=usage)
        if output.finish_reason is not None:
            last = job.reply.usage_event(record.usage()) if job.include_usage else b""
            return await events.finish(news + last)
        if news:
            await events.send(news)
    raise _unfinished()


async def _fail(request: web.Request, events: EventStream, error: Exception) -> None:
    """End a started stream with `error`, for whoever still reads it."""
    record = record_of(request)
    record.outcome = "failed"
    try:
        await events.fail(told_to_client(error, record.request_id))
    except ClientLeftError:
        record.outcome = "client_left"


def _unfinished() -> EngineError:
    return EngineError("the engine's output ended without a finish reason")
