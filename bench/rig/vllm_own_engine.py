"""A vLLM engine in one process with a NIXL connector of vLLM's own; asked line by line on standard input.

Run by rig.vllm_own_pair in the environment of --engine vllm. As in dynrt's engine, NIXL's progress thread is off: it
would take most of a core from whatever else is measured.
"""

from __future__ import annotations

import functools
import os
import select
import sys
import time
from typing import Any

import msgspec

from rig.vllm_own_messages import Answered, Ask, OwnEngineSettings

IDLE_STEP_PAUSE_S = 2e-4  # while all that is open waits for KV: as often as our transfer thread polls


def main() -> None:
    settings = msgspec.json.decode(sys.argv[1], type=OwnEngineSettings)
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what vLLM prints goes where its log goes
    os.environ.update(_environment(settings))
    engine = OwnEngine(settings)
    answers.write(b"ready\n")
    while True:
        for ask in _read_asks(wait=not engine.has_requests()):
            if ask is None:
                return
            engine.add(ask)
        for answered in engine.step():
            answers.write(msgspec.json.encode(answered) + b"\n")


def _environment(settings: OwnEngineSettings) -> dict[str, str]:
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(settings.side_channel_port),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": str(settings.threads),
    }


_unread = bytearray()


def _read_asks(*, wait: bool) -> list[Ask | None]:
    """All that were asked by now, at least one with `wait`; None is the end."""
    asks: list[Ask | None] = []
    while select.select([0], [], [], None if wait and not asks else 0)[0]:
        data = os.read(0, 1 << 20)
        if not data:
            return [*asks, None]
        _unread.extend(data)
        *lines, rest = _unread.split(b"\n")
        _unread[:] = rest
        asks += [msgspec.json.decode(line, type=Ask) for line in lines]
    return asks


class OwnEngine:
    """LLMEngine, and when its connector told what."""

    def __init__(self, settings: OwnEngineSettings) -> None:
        from vllm.distributed import nixl_utils

        config = nixl_utils.nixl_agent_config
        nixl_utils.nixl_agent_config = functools.partial(config, enable_prog_thread=False)

        from vllm import EngineArgs, LLMEngine
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        transfer = KVTransferConfig(
            kv_connector=settings.connector, kv_role=settings.role, kv_buffer_device="cpu"
        )
        self._llm = LLMEngine.from_engine_args(
            EngineArgs(**settings.arguments, kv_transfer_config=transfer, async_scheduling=False)
        )
        self._scheduler = self._llm.engine_core.engine_core.scheduler
        self._received_at: float | None = None
        self._began_at: dict[
            str, tuple[float, float]
        ] = {}  # start and end of a request's first step with a token
        self._note_receptions(get_kv_transfer_group())

    def has_requests(self) -> bool:
        return bool(self._scheduler.has_requests())

    def add(self, ask: Ask) -> None:
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=ask.max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
            extra_args={"kv_transfer_params": ask.kv_transfer_params},
        )
        self._received_at = None
        self._llm.add_request(ask.request_id, tokens_input(ask.prompt_ids), sampling)

    def step(self) -> list[Answered]:
        """Those that it ended."""
        began_at = time.monotonic()
        outputs = self._llm.step()
        ended_at = time.monotonic()
        if not outputs:
            time.sleep(IDLE_STEP_PAUSE_S)
        for output in outputs:
            self._began_at.setdefault(output.request_id, (began_at, ended_at))
        return [self._answered(output) for output in outputs if output.finished]

    def _answered(self, output: Any) -> Answered:
        began_at, ended_at = self._began_at.pop(output.request_id)
        token_ids = list(output.outputs[0].token_ids)
        return Answered(token_ids, began_at, ended_at, self._received_at, output.kv_transfer_params)

    def _note_receptions(self, connector: Any) -> None:
        results_of = connector.get_transfer_results

        def noted(finished_req_ids: set[str]) -> Any:
            results = results_of(finished_req_ids)
            if results.finished_recving:
                self._received_at = time.monotonic()
            return results

        connector.get_transfer_results = noted


if __name__ == "__main__":
    main()
