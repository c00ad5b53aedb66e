"""vLLM's LLMEngine as one `engines.protocol.Engine`: scheduler, model and connector in the compute thread."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence

import vllm
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.exceptions import VLLMError
from vllm.inputs.engine import tokens_input
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from dynrt.engines.config import EngineConfig
from dynrt.engines.protocol import EngineInfo, EngineRequest, LayerHook, Reservation, StepOutput, Token
from dynrt.engines.scheduling.limits import find_fault
from dynrt.engines.vllm.arguments import engine_arguments
from dynrt.engines.vllm.cache_events import CacheEventSink
from dynrt.engines.vllm.cache_index import CacheIndex
from dynrt.engines.vllm.connector import publish_link
from dynrt.engines.vllm.handoffs import RequestId
from dynrt.engines.vllm.info import info_of
from dynrt.engines.vllm.link import Link, NoHook, StepSeen
from dynrt.engines.vllm.outputs import NO_TOKEN, RequestTokens
from dynrt.engines.vllm.ranks import Ranks, ranks_of
from dynrt.engines.vllm.sampling import sampling_of
from dynrt.engines.vllm.versions import check_version
from dynrt.planner.events import BlocksStored
from dynrt.runtime.errors import ConfigError, InvalidRequestError, ModelLoadError
from dynrt.runtime.messages import EngineLoad, StepTiming
from dynrt.transfer.memory import RankMemory

GRAMMAR_WAIT_S = 1e-3  # a step without tokens leaves the interpreter to the threads that compile grammars


class VllmEngine:
    """See engines.protocol.Engine. Raises ConfigError or ModelLoadError if it cannot be built."""

    def __init__(self, config: EngineConfig) -> None:
        check_version(vllm.__version__)
        link_name = secrets.token_hex(8)
        arguments = engine_arguments(config, link_name)
        ranks = self._ranks_of(arguments)
        self._link = Link(arguments.block_size, ranks)
        publish_link(link_name, self._link)
        self._llm = _load(arguments, ranks)
        self._cache = CacheIndex()
        self._scheduler = _scheduler_of(self._llm)
        self._scheduler.kv_event_publisher = CacheEventSink(self._cache)
        self._info = info_of(self._llm, ranks.geometry, config.kv_connector)
        self._requests: dict[RequestId, RequestTokens] = {}
        self._refused: dict[RequestId, str] = {}  # why vLLM does not take them
        self._unreservable: dict[RequestId, str] = {}  # the same, found out after reserve took them
        self._is_stuck = False  # a step would change nothing before something comes from outside
        self._num_preemptions = 0

    @property
    def info(self) -> EngineInfo:
        return self._info

    def kv_memory(self) -> Sequence[RankMemory]:
        return self._link.ranks.memory

    def _ranks_of(self, arguments: EngineArgs) -> Ranks:
        return ranks_of(arguments.tensor_parallel_size)

    # --- between steps ----------------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        name = self._try_add(request, loads_prompt=False)
        if name is not None and request.prefill_only:
            num_tokens = len(request.prompt_ids) + len(request.output_ids)
            self._link.handoffs.open_prefill(name, (request.key, request.epoch), num_tokens)

    def cancel(self, key: bytes, epoch: int) -> None:
        self._refused.pop((key, epoch), None)
        self._unreservable.pop((key, epoch), None)
        request = self._requests.get((key, epoch))
        if request is not None and not self._link.handoffs.is_reserved(request.name):
            self._abort(key, epoch)

    def reserve(self, request: EngineRequest) -> Reservation | None:
        """vLLM's scheduler sets the blocks aside in one of the next steps: until then there is no room."""
        error = self._unreservable.pop((request.key, request.epoch), None)
        if error is not None:
            raise InvalidRequestError(error)
        known = self._requests.get((request.key, request.epoch))
        if known is None:
            name = self._add(request, loads_prompt=True)
            self._link.handoffs.open_receive(name, len(request.prompt_ids) + len(request.output_ids))
            return None
        made = self._link.handoffs.take_reservation(known.name)
        if made is not None:
            known.cached_tokens = made.first_block * self._info.geometry[0].block_size
        return made

    def commit(self, key: bytes, epoch: int, first_token: int | None) -> None:
        assert first_token is None, "this engine samples the first token itself"
        self._is_stuck = False
        self._end_load(self._requests[key, epoch].name)

    def release(self, key: bytes, epoch: int) -> None:
        self._is_stuck = False
        self._link.unpin(self._link.handoffs.close_prefill((key, epoch)))
        request = self._requests.get((key, epoch))
        if request is not None and self._link.handoffs.is_reserved(request.name):
            self._abort(key, epoch)

    def _try_add(self, request: EngineRequest, *, loads_prompt: bool) -> str | None:
        """As `_add`; None for what is refused: its client is told with the next step."""
        try:
            return self._add(request, loads_prompt=loads_prompt)
        except InvalidRequestError as error:
            self._refused[request.key, request.epoch] = error.message
            return None

    def _add(self, request: EngineRequest, *, loads_prompt: bool) -> str:
        """The name that vLLM gives it. Raises InvalidRequestError for what it or we do not take."""
        fault = find_fault(request, self._info.context_length, self._info.vocab_size)
        if fault is not None:
            raise InvalidRequestError(fault)
        self._is_stuck = False
        token_ids = [*request.prompt_ids, *request.output_ids]
        try:
            sampling = self._sampling_of(request, loads_prompt=loads_prompt)
            prompt = tokens_input(token_ids, cache_salt=request.salt or None)
            name: str = self._llm.add_request(_external_name(request), prompt, sampling)
        except (ValueError, VLLMError) as error:
            raise InvalidRequestError(str(error)) from error
        self._requests[request.key, request.epoch] = RequestTokens(name, request, self._info.eos_token_ids)
        return name

    def _sampling_of(self, request: EngineRequest, *, loads_prompt: bool) -> SamplingParams:
        return sampling_of(request, loads_prompt=loads_prompt)

    def _abort(self, key: bytes, epoch: int) -> None:
        self._is_stuck = False
        name = self._requests.pop((key, epoch)).name
        self._end_load(name)
        self._llm.abort_request([name], internal=True)
        if not self._link.handoffs.has_pins((key, epoch)):
            self._link.handoffs.close_prefill((key, epoch))

    def _end_load(self, name: str) -> None:
        """Tell the scheduler what it would else hear from the worker's half, at the end of the step to come."""
        if self._link.handoffs.close_receive(name):
            self._scheduler.finished_recving_kv_req_ids.add(name)

    # --- steps ------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        handoffs = self._link.handoffs
        if self._refused or self._unreservable or self._cache.has_events() or handoffs.has_untaken:
            return True
        has_active = len(self._scheduler.requests) > handoffs.num_reserved
        return not self._is_stuck and (has_active or bool(self._scheduler.finished_req_ids))

    def step(self, hook: LayerHook) -> StepOutput:
        started_at, began_at = time.perf_counter(), time.monotonic()
        self._link.hook, self._link.step = hook, StepSeen()
        try:
            outputs = self._llm.step()
        finally:
            self._link.hook = NoHook()
        seen = self._link.step
        self._num_preemptions += seen.num_preempted
        if seen.admitted:
            self._note_admitted(seen.admitted, began_at)
        tokens = [*self._take_refused(), *(token for output in outputs for token in self._tokens(output))]
        if not (outputs or seen.num_preempted or seen.num_tokens):
            self._nothing_happened()
        return StepOutput(tokens, self._cache.take_events(), self.load(), _timing(seen, started_at))

    def _note_admitted(self, admitted: Mapping[str, int], began_at: float) -> None:
        for request in self._requests.values():
            if request.admitted_at is None and request.name in admitted:
                request.admitted_at = began_at

    def _tokens(self, output: RequestOutput) -> Iterator[Token]:
        request_id = _request_id(output.request_id)
        request = self._requests[request_id]
        if output.finished:
            del self._requests[request_id]
        if self._link.handoffs.is_receiving(request.name):
            self._link.handoffs.close_receive(request.name)
            (token,) = request.read(output)
            self._unreservable[request_id] = token.error or "vLLM ended the request before it began"
        else:
            yield from request.read(output)

    def _take_refused(self) -> list[Token]:
        refused, self._refused = self._refused, {}
        return [
            Token(*request_id, NO_TOKEN, finish_reason="error", error=error, is_refusal=True)
            for request_id, error in refused.items()
        ]

    def _nothing_happened(self) -> None:
        """vLLM would do the same again, unless a thread of its own is about to bring something."""
        waiting = self._scheduler.deferred_waiting
        if any(request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR for request in waiting):
            time.sleep(GRAMMAR_WAIT_S)
        else:
            self._is_stuck = True

    # --- at any time ------------------------------------------------------------------------------

    def load(self) -> EngineLoad:
        pool = self._scheduler.kv_cache_manager.block_pool
        running, waiting = self._scheduler.get_request_counts()
        total = pool.num_gpu_blocks - 1  # one is vLLM's null block
        active = total - pool.get_num_free_blocks()
        return EngineLoad(
            waiting_requests=waiting - self._link.handoffs.num_receiving,
            running_requests=running,
            blocks_total=total,
            blocks_active=active,
            blocks_cached=max(0, self._cache.num_blocks - active),  # nearly: active ones are cached once full
            preemptions_total=self._num_preemptions,
        )

    def cache_snapshot(self) -> list[BlocksStored]:
        return self._cache.snapshot()

    def close(self) -> None:
        """Free the memory; nothing else may be called afterwards."""
        self._llm.engine_core.shutdown()


def _load(arguments: EngineArgs, ranks: Ranks) -> LLMEngine:
    arguments.kv_transfer_config.kv_connector_extra_config |= ranks.settings
    try:
        llm = _load_model(arguments)
        ranks.await_all()
    finally:
        ranks.close()
    return llm


def _load_model(arguments: EngineArgs) -> LLMEngine:
    try:
        return LLMEngine.from_engine_args(arguments)
    except OSError as error:
        raise ModelLoadError(f"vLLM cannot read {arguments.model}: {error}") from error
    except (ValueError, VLLMError) as error:
        raise ConfigError(f"vLLM does not start as it was configured: {error}") from error
    except Exception as error:  # of a worker process only its text comes here, as whatever vLLM wraps it in
        if arguments.tensor_parallel_size == 1:
            raise
        raise ConfigError(f"a worker process of vLLM does not start: {error}") from error


def _scheduler_of(llm: LLMEngine) -> Scheduler:
    scheduler = llm.engine_core.engine_core.scheduler
    assert isinstance(scheduler, Scheduler)
    return scheduler


def _external_name(request: EngineRequest) -> str:
    """What vLLM's outputs say of whom they are; it adds to it for the names in its own tables."""
    return f"{request.key.hex()}:{request.epoch}"


def _request_id(external_name: str) -> RequestId:
    key, epoch = external_name.split(":")
    return bytes.fromhex(key), int(epoch)


def _timing(seen: StepSeen, started_at: float) -> StepTiming | None:
    if not seen.num_tokens:
        return None
    return seen.work.timing(time.perf_counter() - started_at, ended_at=time.monotonic())
