"""`dynrt serve`: a runtime and its HTTP endpoint, from the command line to the last signal."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from dynrt.engines.config import SimConfig, engine_args_of, transfer_options_of
from dynrt.runtime.config import RuntimeConfig
from dynrt.runtime.errors import ConfigError, NoWorkerError
from dynrt.runtime.fronts.fronts import MAX_FRONTS, Fronts
from dynrt.runtime.fronts.messages import FrontSettings
from dynrt.runtime.http.answers.formats import AnswerFormats
from dynrt.runtime.http.options import EndpointOptions
from dynrt.runtime.http.transport.listen import hold_port, url_of
from dynrt.runtime.http.transport.server import HttpServer, check_options
from dynrt.runtime.logs import set_up_logs
from dynrt.runtime.loop import freeze_start, loop_factory
from dynrt.runtime.messages import SamplingParams
from dynrt.runtime.open_files import allow_many
from dynrt.runtime.requests import GenerateRequest
from dynrt.runtime.runtime import Runtime
from dynrt.runtime.service import ServiceNotices

log = logging.getLogger("dynrt.serve")

NOTICE_S = 3.0  # between SIGTERM and the first refusal: load balancers see /ready fail and turn elsewhere
DRAIN_S = 30.0
PROBE_TIMEOUT_S = 120.0


def serve(arguments: argparse.Namespace) -> int:
    """Until SIGINT or SIGTERM. Raises ConfigError for what cannot work."""
    set_up_logs(arguments.log_format)
    allow_many()
    if not 0 <= arguments.port <= 65535:
        raise ConfigError(f"--port is {arguments.port}; it can be 0 (any free port) to 65535")
    if not 1 <= arguments.frontends <= MAX_FRONTS:
        raise ConfigError(f"--frontends is {arguments.frontends}; it can be 1 to {MAX_FRONTS}")
    if arguments.frontends > 1 and arguments.uds is not None:
        raise ConfigError("--frontends shares a TCP port; a unix socket (--uds) has one front")
    config = RuntimeConfig(
        model=arguments.model,
        prefill=arguments.prefill,
        decode=arguments.decode,
        engine=arguments.engine,
        dtype=arguments.dtype,
        device=arguments.device,
        threads=arguments.threads,
        local_prefill=arguments.local_prefill,
        kv_blocks=arguments.kv_blocks,
        max_batch_tokens=arguments.max_batch_tokens,
        max_batch_requests=arguments.max_batch_requests,
        engine_args=engine_args_of(arguments.engine, arguments.engine_arg),
        max_waiting_requests=arguments.max_waiting_requests,
        max_ttft_s=arguments.max_ttft,
        index_memory_bytes=int(arguments.index_memory * 1e6),
        otel_endpoint=arguments.otel or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"),
        control=arguments.control,
        sim=SimConfig(arguments.sim_profile, arguments.speedup),
        transfer=transfer_options_of(arguments.verify_kv, arguments.nixl_backend, arguments.ucx),
        kv_connector=arguments.kv_connector,
    )
    options = endpoint_options(arguments, os.environ)
    check_options(options)
    service = ServiceNotices(os.environ)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(_serve(config, options, arguments, service))


def endpoint_options(arguments: argparse.Namespace, environment: Mapping[str, str]) -> EndpointOptions:
    """Keys come from a file or the environment: what is on a command line, every user of the machine can see."""
    return EndpointOptions(
        api_key_file=arguments.api_key_file,
        api_keys=tuple(re.findall(r"[^\s,]+", environment.get("DYNRT_API_KEYS", ""))),
        guard_metrics=not arguments.open_metrics,
        allow_unauthenticated=arguments.allow_unauthenticated,
        cors_origins=tuple(arguments.cors_origin),
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        answer_formats=AnswerFormats(arguments.tool_parser, arguments.reasoning_parser),
    )


async def _serve(
    config: RuntimeConfig, options: EndpointOptions, arguments: argparse.Namespace, service: ServiceNotices
) -> int:
    if arguments.frontends > 1:
        return await _serve_by_fronts(config, options, arguments, service)
    runtime = Runtime(config)
    server = HttpServer(runtime, options)
    stop = _StopSignals()
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, server.reload)
    await _listen(server, arguments)  # first of all: a port in use is told before a model is loaded
    try:
        async with runtime:
            await _serves(runtime)
            await _until_drained(stop, server, runtime, server.url, service)
    except asyncio.CancelledError:
        if not stop.interrupted:
            raise
    finally:
        await server.stop(0.0)
    return 0


async def _serve_by_fronts(
    config: RuntimeConfig, options: EndpointOptions, arguments: argparse.Namespace, service: ServiceNotices
) -> int:
    """The endpoint runs in processes of its own, which share the port."""
    stop = _StopSignals()
    loop = asyncio.get_running_loop()
    host = arguments.host
    held = await hold_port(host, arguments.port, loopback_only=options.loopback_only)
    try:
        async with Runtime(config) as runtime:
            await _serves(runtime)
            settings = FrontSettings("", "", host, held.getsockname()[1], runtime.model_path, options)
            async with Fronts(runtime, settings, arguments.frontends) as fronts:
                loop.add_signal_handler(signal.SIGHUP, fronts.reload)
                url = url_of(host, settings.port, tls=options.tls_cert is not None)
                await _until_drained(stop, fronts, runtime, url, service)
    except asyncio.CancelledError:
        if not stop.interrupted:
            raise
    finally:
        held.close()
    return 0


async def _listen(server: HttpServer, arguments: argparse.Namespace) -> None:
    if arguments.uds is None:
        await server.start(arguments.host, arguments.port)
    else:
        await server.start_unix(Path(arguments.uds), arguments.uds_mode)


async def _until_drained(
    stop: _StopSignals, server: HttpServer | Fronts, runtime: Runtime, url: str, service: ServiceNotices
) -> None:
    """Says that it serves, to systemd and to people, and serves until a signal comes."""
    line = f"dynrt serves {runtime.models()[0].name} at {url}"
    service.ready(line)
    print(line, flush=True)
    number = await stop.first()
    service.stopping()
    await _drain(number, server, runtime)


async def _drain(number: signal.Signals, server: HttpServer | Fronts, runtime: Runtime) -> None:
    """End without cutting off a request. SIGINT comes from a person, who has no load balancer to wait for."""
    if number == signal.SIGTERM:
        log.info("ending; requests are still taken", extra={"for_s": NOTICE_S})
        server.announce_end()
        await asyncio.sleep(NOTICE_S)
    log.info("draining", extra={"limit_s": DRAIN_S})
    runtime.drain()
    await server.stop(DRAIN_S)


async def _serves(runtime: Runtime) -> None:
    """Until the first request has succeeded; an engine that is lost over it is waited for again."""
    while True:
        await runtime.engine_joined()
        with suppress(NoWorkerError):
            await _probe(runtime)
            return freeze_start()


async def _probe(runtime: Runtime) -> None:
    """One real request through the very path that clients take. Raises ConfigError if it does not end."""
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(await runtime.encode("Hello"), sampling, request_id="probe")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            async for _ in runtime.generate(request):
                pass
    except TimeoutError:
        raise ConfigError(
            f"a first request of one token was not answered within {PROBE_TIMEOUT_S:g} s; its engines' logs are above"
        ) from None


class _StopSignals:
    """SIGINT or SIGTERM: the first drains what is being served, or ends a start at once; the second ends all."""

    def __init__(self) -> None:
        self.interrupted = False
        self._task = asyncio.current_task()
        self._first: asyncio.Future[signal.Signals] | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    async def first(self) -> signal.Signals:
        self._first = asyncio.get_running_loop().create_future()
        return await self._first

    def _on_signal(self, number: signal.Signals) -> None:
        if self._first is not None and not self._first.done():
            self._first.set_result(number)
            return
        self.interrupted = True
        assert self._task is not None
        self._task.cancel()
