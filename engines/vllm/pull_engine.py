"""The vLLM engine whose KV vLLM's own NixlConnector moves: decode reads prefill's blocks once the prompt is computed.

Blocks are vLLM's alone. Prefill holds those of a computed prompt until decode has read them, or until vLLM's lease on
them is over (30 s, renewed by decode while the request waits there). A read that fails is computed again by decode.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec
from vllm import EngineArgs, SamplingParams

from dynrt.engines.protocol import EngineRequest, Reservation
from dynrt.engines.vllm.engine import VllmEngine
from dynrt.engines.vllm.ranks import Ranks, UnseenRanks
from dynrt.runtime.errors import InvalidRequestError

IDLE_STEP_S = 1e-3  # while all that is open waits for a read: as often as vLLM's own loop looks
# What vLLM's proxies ask of a prefill server.
KEEP_FOR_A_READER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class PullEngine(VllmEngine):
    """See the module, and engines.protocol.Engine; nothing is reserved, committed or released here."""

    def _ranks_of(self, arguments: EngineArgs) -> Ranks:
        return UnseenRanks()

    def submit(self, request: EngineRequest) -> None:
        self._try_add(request, loads_prompt=bool(request.kv_transfer_params))

    def reserve(self, request: EngineRequest) -> Reservation | None:
        raise InvalidRequestError("nothing can be pushed here: vLLM's own connector pulls")

    def has_work(self) -> bool:
        """vLLM's connector hears of reads and of leases in steps, with or without tokens."""
        return bool(self._refused) or self._cache.has_events() or self._scheduler.has_requests()

    def _sampling_of(self, request: EngineRequest, *, loads_prompt: bool) -> SamplingParams:
        sampling = super()._sampling_of(request, loads_prompt=loads_prompt)
        params = _transfer_params(request)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        return sampling

    def _note_admitted(self, admitted: Mapping[str, int], began_at: float) -> None:
        """What was read counts as cached: so the runtime hears whether all of it came."""
        super()._note_admitted(admitted, began_at)
        for request in self._requests.values():
            if request.name in admitted:
                request.cached_tokens = admitted[request.name]

    def _nothing_happened(self) -> None:
        time.sleep(IDLE_STEP_S)


def _transfer_params(request: EngineRequest) -> dict[str, Any] | None:
    if request.prefill_only:
        return dict(KEEP_FOR_A_READER)
    if request.kv_transfer_params:
        params: dict[str, Any] = msgspec.msgpack.decode(request.kv_transfer_params)
        return params
    return None
