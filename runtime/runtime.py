"""The Runtime: starts the engines, plans each request onto them, streams its tokens, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import msgspec

from dynrt.engines.token_bytes import TokenBytes
from dynrt.planner.admission import AdmissionLimits
from dynrt.planner.planner import Planner
from dynrt.runtime.attempts import Attempts
from dynrt.runtime.channel import Channel
from dynrt.runtime.config import RuntimeConfig, check_config
from dynrt.runtime.errors import (
    ModelNotFoundError,
    NoWorkerError,
    OverloadedError,
)
from dynrt.runtime.fleet import Fleet
from dynrt.runtime.frame_sink import FrameSink
from dynrt.runtime.http_counts import HttpCounts
from dynrt.runtime.messages import SamplingParams, Status
from dynrt.runtime.model import find_model
from dynrt.runtime.offload import Offload, ThreadOffload
from dynrt.runtime.parts import Parts
from dynrt.runtime.planning import RETRY_AFTER_S
from dynrt.runtime.prompts import PromptEncoder
from dynrt.runtime.request_check import check_prompt
from dynrt.runtime.request_life import RequestLife
from dynrt.runtime.requests import GenerateOutput, GenerateRequest, ModelCard, TokenizerInfo
from dynrt.runtime.spawner import ProcessSpawner, Spawner
from dynrt.runtime.tokenizing import Tokenizing
from dynrt.runtime.tracing import Trace, open_tracing
from dynrt.runtime.zmq_channel import ZmqChannel


class Runtime:
    """`async with Runtime(config) as runtime: async for output in runtime.generate(request): …`

    Like a task group: if a part of the runtime fails, the body of the `async with` is cancelled and the failure
    raised at its end. Time, randomness and the outside world come in through the event loop and the arguments.
    """

    def __init__(
        self,
        config: RuntimeConfig | None = None,
        *,
        channel: Channel | None = None,
        spawner: Spawner | None = None,
        offload: Offload | None = None,
        randomness: random.Random | None = None,
        make_planner: Callable[[random.Random], Planner] | None = None,
    ) -> None:
        self._config = config if config is not None else RuntimeConfig()
        check_config(self._config)
        self._tracing = open_tracing(self._config.otel_endpoint)
        self._channel = channel if channel is not None else ZmqChannel(self._config.control)
        self._spawner = spawner if spawner is not None else ProcessSpawner()
        self._offload = offload if offload is not None else ThreadOffload()
        self._random = randomness if randomness is not None else random.Random()
        self._make_planner = make_planner or self._own_planner
        self._id = secrets.token_hex(4)
        self._group = asyncio.TaskGroup()
        self._started = False
        self._draining = False
        self._created = int(time.time())
        self._card: ModelCard | None = None
        self._card_changes = 0  # of the fleet, up to the card
        self._parts: Parts | None = None  # until the model has been found

    # --- life -------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        try:
            await self._start()
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._draining = True
        if self._parts is not None:
            self._parts.stop()
        try:
            await self._group.__aexit__(kind, error, trace)
        except BaseExceptionGroup as failures:
            raise _sole(failures) from None
        finally:
            if self._parts is not None:
                self._parts.fleet.disband()
            self._channel.close()
            try:
                await self._offload.run(self._tracing.close)
            finally:
                self._offload.close()

    async def engine_joined(self) -> None:
        """Until there is an engine: at once, unless all of them join by themselves. Raises ConfigError."""
        await self._assembled.engine_joined()

    def drain(self) -> None:
        """Take no new requests; those under way go on."""
        self._draining = True

    async def _start(self) -> None:
        self._model = await find_model(self._config.model, self._offload)
        prompts = await self._offload.run(lambda: PromptEncoder.from_dir(self._model.path))
        self._tokenizing = Tokenizing(prompts, self._offload)
        planner = self._make_planner(self._random)
        parts = (self._id, self._config, self._model, self._channel, self._spawner, planner, self._group)
        self._parts = Parts(*parts)
        self._parts.start()
        await self._parts.complete()
        self._started = True

    def _own_planner(self, randomness: random.Random) -> Planner:
        limits = AdmissionLimits(self._config.max_ttft_s, self._config.max_waiting_requests)
        return Planner(randomness, index_bytes=self._config.index_memory_bytes, limits=limits)

    @property
    def _assembled(self) -> Parts:
        assert self._parts is not None, "the runtime has not been entered"
        return self._parts

    @property
    def model_path(self) -> str:
        """The served model's directory."""
        return self._model.path

    # --- what it serves ---------------------------------------------------------------------------

    def models(self) -> list[ModelCard]:
        """Empty until the first engine has registered: it knows its limits."""
        if self._parts is not None and self._parts.fleet.changes != self._card_changes:
            self._card_changes = self._parts.fleet.changes
            self._card = self._new_card(self._parts.fleet) or self._card  # the last known: engines come back
        return [] if self._card is None else [self._card]

    def _new_card(self, fleet: Fleet) -> ModelCard | None:
        registers = [worker.register for worker in fleet]
        if not registers:
            return None
        context_length = min(register.context_length for register in registers)
        vocab_size = min(register.vocab_size for register in registers)
        takes_grammar = all(register.takes_grammar for register in registers)
        return ModelCard(self._model.name, self._created, context_length, vocab_size, takes_grammar)

    def ready(self) -> str | None:
        """None if a request could be served from end to end, else why not."""
        if self._draining:
            return "the server is shutting down"
        if not self._started:
            return "the engines are loading"
        if not len(self._assembled.fleet):
            return "no engine is up"
        return None

    def draining(self) -> bool:
        return self._draining

    def count_http(self, counts: HttpCounts) -> None:
        """What an endpoint has answered since it said so last."""
        if self._parts is not None:
            self._parts.metrics.count_http(counts)

    async def metrics(self) -> bytes:
        return self.metrics_text()

    def metrics_text(self) -> bytes:
        return b"" if self._parts is None else self._parts.dispatcher.metrics_text()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Coroutine[Any, Any, bytes]:
        """Token ids of `text`, packed."""
        self._check_up()
        return self._tokenizing.encode(text, add_special_tokens=add_special_tokens)

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> Coroutine[Any, Any, bytes]:
        """Token ids of a chat behind the model's template, packed."""
        self._check_up()
        return self._tokenizing.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )

    def decode(self, token_ids: bytes, *, skip_special_tokens: bool = True) -> Coroutine[Any, Any, str]:
        """The text of packed ids."""
        self._check_up()
        return self._tokenizing.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def token_names(self, token_ids: bytes) -> Coroutine[Any, Any, list[str]]:
        """Each of packed ids as the vocabulary spells it."""
        self._check_up()
        return self._tokenizing.token_names(token_ids)

    def tokenizer_info(self) -> TokenizerInfo:
        """What a client must know to prepare prompts itself."""
        self._check_up()
        return self._tokenizing.tokenizer_info()

    def token_bytes(self) -> TokenBytes:
        """What each token of the model stands for."""
        self._check_up()
        return self._tokenizing.token_bytes()

    async def generate(
        self, request: GenerateRequest, sink: FrameSink | None = None
    ) -> AsyncGenerator[GenerateOutput, None]:
        """Outputs until one has a finish_reason. Closing it, or cancelling its task, ends the request everywhere.

        `sink` takes the events of a request that has a frame past this generator, where it can; it costs less.
        """
        self._admit(request)
        attempts = self._assembled.attempts
        life, trace = self._begin(request, sink, attempts)
        failure: Exception | None = None
        attempts.open_requests += 1
        try:
            output = await life.next()
            attempts.first_output(life)
            yield output
            while output.finish_reason is None:
                output = await life.next()
                yield output
        except Exception as error:
            failure = error
            raise
        finally:
            life.close()
            attempts.request_ended(life, trace, failure)

    def _begin(
        self, request: GenerateRequest, sink: FrameSink | None, attempts: Attempts
    ) -> tuple[RequestLife, Trace | None]:
        config, now = self._config, asyncio.get_running_loop().time()
        key = self._random.randbytes(16)
        if not request.request_id or not request.model:
            request = msgspec.structs.replace(
                request, request_id=request.request_id or key.hex(), model=self._model.name
            )
        trace = self._tracing.begin(request, now)
        if trace is not None:
            request = msgspec.structs.replace(request, traceparent=trace.traceparent)
        life = RequestLife(
            key,
            request,
            self._sampling(request),
            request.local_prefill or config.local_prefill,
            attempts,
            sink if request.frame is not None else None,
            began_at=now,
            max_attempts=config.max_attempts,
            no_worker_wait_s=config.no_worker_wait_s,
        )
        return life, trace

    async def status(self) -> dict[str, Status]:
        """The inside of every engine, by worker id."""
        return await self._assembled.status()

    def pids(self) -> dict[str, int]:
        """The engine processes' pids, by worker id."""
        return {worker.id: worker.register.pid for worker in self._assembled.fleet}

    def idle(self) -> bool:
        """Nothing is open, on the way or waiting in a mailbox."""
        return self._assembled.idle()

    # --- admission --------------------------------------------------------------------------------

    def _check_up(self) -> None:
        reason = self.ready() if self._draining or self._parts is None else None
        if reason is not None:
            raise OverloadedError(f"{reason}; try again in a moment", retry_after_s=RETRY_AFTER_S)

    def _admit(self, request: GenerateRequest) -> None:
        self._check_up()
        cards = self.models()
        if not cards:
            raise NoWorkerError("no engine is up; try again in a moment", retry_after_s=RETRY_AFTER_S)
        if request.model not in ("", cards[0].name):
            raise ModelNotFoundError(
                f"model {request.model!r} is not served here; {cards[0].name!r} is", param="model"
            )
        limit = self._config.max_open_requests
        if self._assembled.attempts.open_requests >= limit:
            raise OverloadedError(
                f"{limit} requests are open, the limit; try again in a moment", retry_after_s=RETRY_AFTER_S
            )
        check_prompt(request, cards[0])

    def _sampling(self, request: GenerateRequest) -> SamplingParams:
        if request.seeded:
            return request.sampling
        return msgspec.structs.replace(request.sampling, seed=self._random.getrandbits(63))


def _sole(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure itself where there is just one."""
    if len(failures.exceptions) > 1:
        return failures
    only = failures.exceptions[0]
    return _sole(only) if isinstance(only, BaseExceptionGroup) else only
