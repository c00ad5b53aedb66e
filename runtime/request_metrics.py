"""What is measured of each request, under dynrt's names and under those that boards made for vLLM read."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec
from prometheus_client import CollectorRegistry

from dynrt.runtime.counter import Counter
from dynrt.runtime.messages import FinishReason
from dynrt.runtime.request_times import RequestTimes
from dynrt.runtime.tally import Tally, TallyExport

LATENCY_BUCKETS_S = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75,
    1.0, 1.5, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
TOKEN_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

RequestOutcome = Literal["finished", "failed", "cancelled"]
# vLLM's words for how a request ended.
_FINISHED: dict[FinishReason | RequestOutcome, str] = {
    "stop": "stop", "length": "length", "failed": "error", "error": "error", "cancelled": "abort",
}  # fmt: skip


class EndedRequest(msgspec.Struct, frozen=True):
    """A request that is over, without anything of what it said."""

    outcome: RequestOutcome
    finish_reason: FinishReason | None  # of a finished one
    times: RequestTimes
    ended_at: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int


class RequestMetrics:
    """`names`: of a model, as vLLM's labels. Every value is kept once, whatever the number of its names."""

    def __init__(self, vllm_labels: dict[str, str], registry: CollectorRegistry) -> None:
        self._labels = vllm_labels
        self._registry = registry
        self._add_latencies()
        self._add_sizes()
        self._add_counters()

    def _add_latencies(self) -> None:
        self.ttft_s = self._tally("ttft_seconds", "Time to first token", "time_to_first_token_seconds")
        self._token_gap_s = self._tally(
            "inter_token_seconds", "From a token to the next", "inter_token_latency_seconds"
        )
        self._per_token_s = self._tally(
            "request_seconds_per_token",
            "A finished request's time per token behind its first",
            "request_time_per_output_token_seconds",
        )
        self._request_s = self._tally(
            "request_seconds",
            "From a finished request's arrival to its last token",
            "e2e_request_latency_seconds",
        )
        self._plan_s = self._tally(
            "request_plan_seconds", "From a finished request's arrival to its first plan"
        )
        self._queue_s = self._tally(
            "request_queue_seconds",
            "From a finished request's arrival until its prompt began to be computed",
            "request_queue_time_seconds",
        )
        self._prefill_s = self._tally(
            "request_prefill_seconds", "From there to its first token", "request_prefill_time_seconds"
        )
        self._decode_s = self._tally(
            "request_decode_seconds", "From there to its last token", "request_decode_time_seconds"
        )
        self._inference_s = self._tally(
            "request_inference_seconds", "Prefill and decode", "request_inference_time_seconds"
        )

    def _add_sizes(self) -> None:
        sizes = TOKEN_BUCKETS
        self._prompt_tokens = self._tally(
            "request_prompt_tokens", "Of a finished request", "request_prompt_tokens", sizes
        )
        self._output_tokens = self._tally(
            "request_output_tokens", "Of a finished request", "request_generation_tokens", sizes
        )
        self._max_tokens = self._tally(
            "request_max_tokens", "That a finished request asked for", "request_params_max_tokens", sizes
        )
        self._step_tokens = self._tally(
            "step_tokens", "Computed in one step of an engine", "iteration_tokens_total", sizes
        )

    def _add_counters(self) -> None:
        requests = Counter(
            "dynrt_requests", "Requests by how they ended", ["outcome"], registry=self._registry
        )
        success = Counter(
            "vllm:request_success",
            "Requests by why they ended",
            [*self._labels, "finished_reason"],
            registry=self._registry,
        )
        self._by_outcome = {outcome: requests.labels(outcome) for outcome in get_args(RequestOutcome)}
        self._by_end = {
            end: success.labels(*self._labels.values(), reason) for end, reason in _FINISHED.items()
        }

    def _tally(
        self, name: str, text: str, vllm_name: str | None = None, bounds: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Tally:
        tally = Tally(bounds)
        self._registry.register(TallyExport(f"dynrt_{name}", text, tally, {}))
        if vllm_name is not None:
            self._registry.register(TallyExport(f"vllm:{vllm_name}", text, tally, self._labels))
        return tally

    # --- what happens -----------------------------------------------------------------------------

    def step(self, num_tokens: int) -> None:
        """An engine has computed so many tokens in one step."""
        self._step_tokens.observe(num_tokens)

    def tokens_followed(self, at: float, last_token_at: list[float]) -> None:
        """A step that ended `at` brought tokens to requests whose last ones had come at these times.

        In bulk: most requests of a batch had theirs from the same step, and are told by a look at the list.
        """
        if last_token_at and last_token_at.count(last_token_at[0]) == len(last_token_at):
            self._token_gap_s.observe(max(0.0, at - last_token_at[0]), len(last_token_at))
            return
        for since, count in Counts(last_token_at).items():
            self._token_gap_s.observe(max(0.0, at - since), count)

    def ended(self, request: EndedRequest) -> None:
        """Latencies and sizes are those of finished requests: others would tell how patient clients are."""
        self._by_outcome[request.outcome].value += 1
        self._by_end[request.finish_reason or request.outcome].value += 1
        if request.outcome == "finished":
            self._finished(request)

    def _finished(self, request: EndedRequest) -> None:
        self._prompt_tokens.observe(request.prompt_tokens)
        self._output_tokens.observe(request.output_tokens)
        self._max_tokens.observe(request.max_tokens)
        times, last_token_at = request.times, request.times.last_token_at
        admitted_at, computed_at = times.admitted_at, times.computed_at
        self._request_s.observe_between(times.began_at, last_token_at)
        if times.stages:
            self._plan_s.observe_between(times.began_at, times.stages[0].planned_at)
        self._queue_s.observe_between(times.began_at, admitted_at)  # with attempts that came to nothing
        if computed_at is not None:
            self._prefill_s.observe_between(admitted_at, computed_at)
            self._decode_s.observe_between(computed_at, last_token_at)
            self._inference_s.observe_between(admitted_at, last_token_at)
        self._per_token_s.observe_between(times.first_token_at, last_token_at, request.output_tokens - 1)
