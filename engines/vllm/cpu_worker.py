"""vLLM's worker for CPUs, which ends over a seed whose prompt takes more than one step."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker


class SeededCpuWorker(CPUWorker):
    """Requests whose prompt is not complete yet do not draw from their own random numbers.

    vLLM 0.32 lets them, and takes it back by an offset that only the generators of GPUs have.
    """

    def sample_tokens(self, grammar_output: Any) -> Any:
        batch = self.model_runner.input_batch
        incomplete = self.model_runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        kept = {row: batch.generators.pop(row) for row in incomplete if row in batch.generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            batch.generators.update(kept)
