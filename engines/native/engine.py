"""The native engine: scheduler and block pool around a torch model, as one `engines.protocol.Engine`."""

from __future__ import annotations

import time

import msgspec
import torch

from dynrt.engines.config import EngineConfig
from dynrt.engines.native.constraints import Allowed, Constraints
from dynrt.engines.native.linear import bound_kernel_caches
from dynrt.engines.native.logits import changed
from dynrt.engines.native.logprobs import prompt_logprobs, sampled_logprobs
from dynrt.engines.native.model import HiddenStates, Model, default_dtype, load_model
from dynrt.engines.native.sampler import sample
from dynrt.engines.protocol import EngineInfo, EngineRequest, LayerHook, Reservation, StepOutput, Token
from dynrt.engines.scheduling.limits import limits_of
from dynrt.engines.scheduling.scheduled import ScheduledEngine
from dynrt.engines.scheduling.scheduler import Batch
from dynrt.engines.scheduling.sequence import RequestId
from dynrt.engines.scheduling.work import StepWork
from dynrt.runtime.errors import ConfigError, InvalidRequestError
from dynrt.runtime.messages import StepTiming, TokenLogprob
from dynrt.transfer.layout import KvGeometry, KvRegion

CPU_KV_BYTES = 1 << 30  # the KV cache on a CPU, unless one full context needs more
CUDA_KV_SHARE = 0.85  # of the memory that is free once the model is loaded; the rest is for activations


class Sampled(msgspec.Struct, frozen=True):
    """What a step's forward pass brought, for each chunk with `sample`, in order."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None] | None  # None: no request asks
    errors: dict[RequestId, str]  # requests that end here; their tokens mean nothing


class NativeEngine(ScheduledEngine):
    """See engines.protocol.Engine. Raises ConfigError or ModelLoadError if it cannot be built."""

    def __init__(self, config: EngineConfig) -> None:
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        bound_kernel_caches()
        self._device = _choose_device(config)
        dtype = default_dtype(self._device) if config.dtype == "auto" else getattr(torch, config.dtype)
        self._model = load_model(config.model_dir, dtype, self._device)
        geometry = _choose_geometry(config, self._model, dtype, self._device)
        self._kv = self._model.new_kv_cache(geometry.num_blocks, geometry.block_size)
        info = EngineInfo(
            kind="native",
            context_length=self._model.config.context_length,
            vocab_size=self._model.config.vocab_size,
            eos_token_ids=frozenset(self._model.config.eos_token_ids),
            geometry=[geometry],
            takes_grammar=True,
        )
        self._constraints = Constraints(config.model_dir, info)
        super().__init__(info, limits_of(config, info))

    def kv_memory(self) -> list[list[KvRegion]]:
        return [[KvRegion(layer.data_ptr(), layer.nbytes, layer.device.index) for layer in self._kv]]

    def submit(self, request: EngineRequest) -> None:
        try:
            self._constraints.check(request)
        except InvalidRequestError as error:
            self._scheduler.refuse(request, error.message)
        else:
            super().submit(request)

    def reserve(self, request: EngineRequest) -> Reservation | None:
        self._constraints.check(request)
        return super().reserve(request)

    def step(self, hook: LayerHook) -> StepOutput:
        started_at = time.perf_counter()
        tokens, timing = self._scheduler.take_refused(), None
        batch = self._scheduler.schedule(time.monotonic())
        if batch.chunks:
            computed, timing = self._run(batch, hook, started_at)
            tokens += computed
        return StepOutput(tokens, self._pool.take_events(), self.load(), timing)

    def close(self) -> None:
        """Free the KV cache and the model; nothing else may be called afterwards."""
        del self._kv, self._model
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _run(self, batch: Batch, hook: LayerHook, started_at: float) -> tuple[list[Token], StepTiming | None]:
        """Compute a batch. What torch refuses (no memory, say) ends this batch's requests, not the engine."""
        if batch.ready:
            hook.step_begins(batch.ready)
        try:
            sampled = self._compute(batch, hook)
        except (
            torch.AcceleratorError
        ):  # the device is lost to this process: whatever it tried next would fail
            raise
        except RuntimeError as error:
            return self._scheduler.fail(batch, f"a step of {batch.num_tokens} tokens failed: {error}"), None
        tokens = self._scheduler.advance(batch, sampled.token_ids, sampled.logprobs, sampled.errors)
        duration_s = time.perf_counter() - started_at
        return tokens, StepWork.of(batch.chunks).timing(duration_s, ended_at=time.monotonic())

    @torch.inference_mode()
    def _compute(self, batch: Batch, hook: LayerHook) -> Sampled:
        """The batch's KV into the cache, and a token for each chunk with `sample`."""
        grows = any(not blocks.written for blocks in batch.ready)
        hidden = self._model.hidden(batch.chunks, self._kv, hook.layer_written if grows else None)
        allowed = self._constraints.allowed(batch)
        self._score_prompts(batch, hidden)
        return self._sample(batch, hidden, allowed)

    def _score_prompts(self, batch: Batch, hidden: HiddenStates) -> None:
        for index, (sequence, chunk) in enumerate(zip(batch.sequences, batch.chunks, strict=True)):
            if chunk.score is not None and sequence.prompt_logprobs is not None:
                rows = hidden.rows_of(index, batch.chunks)
                sequence.prompt_logprobs += prompt_logprobs(rows, chunk.score, self._model.logits)

    def _sample(self, batch: Batch, hidden: HiddenStates, allowed: Allowed) -> Sampled:
        specs = [chunk.sample for chunk in batch.chunks if chunk.sample is not None]
        logits = changed(self._model.logits(hidden.last_rows(batch.chunks)), specs)
        token_ids = sample(logits, specs, allowed.bits)
        return Sampled(token_ids, sampled_logprobs(logits, specs, token_ids), allowed.errors)


def _choose_device(config: EngineConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda' and torch finds no CUDA device: use 'cpu' or 'auto'")
    if config.device == "cpu" or not has_cuda:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def _choose_geometry(
    config: EngineConfig, model: Model, dtype: torch.dtype, device: torch.device
) -> KvGeometry:
    geometry = KvGeometry(
        num_layers=model.config.num_layers,
        num_blocks=0,
        block_size=config.block_size,
        num_kv_heads=model.config.num_kv_heads,
        head_size=model.config.head_size,
        dtype=str(dtype).removeprefix("torch."),
    )
    num_blocks = config.kv_blocks
    if num_blocks is None:
        num_blocks = _count_blocks(geometry, model.config.context_length, device)
    if num_blocks < 1:
        raise ConfigError(f"the KV cache would have {num_blocks} blocks: free device memory or set kv_blocks")
    return msgspec.structs.replace(geometry, num_blocks=num_blocks)


def _count_blocks(geometry: KvGeometry, context_length: int, device: torch.device) -> int:
    block_bytes = geometry.num_layers * geometry.layer_block_bytes
    if device.type == "cuda":
        free_bytes, _total_bytes = torch.cuda.mem_get_info(device)
        return int(free_bytes * CUDA_KV_SHARE) // block_bytes
    full_context = -(-context_length // geometry.block_size)
    return max(CPU_KV_BYTES // block_bytes, full_context)
