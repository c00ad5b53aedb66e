"""Every metric that dynrt exports, under one registry per runtime."""

from __future__ import annotations

from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Gauge, Histogram, generate_latest

from dynrt.planner.plan import RefusalKind
from dynrt.runtime.counter import Count, Counter
from dynrt.runtime.http_counts import HttpCounts
from dynrt.runtime.messages import EngineLoad
from dynrt.runtime.request_metrics import RequestMetrics
from dynrt.transfer.events import Cause
from dynrt.transfer.ledger_effects import Outcome

Retargeted = Literal["moved", "local", "rejected"]  # to another decode worker, nowhere, or turned away

EXPOSED_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)


class Metrics:
    """Names under `dynrt_` are ours; those under `vllm:` let dashboards made for vLLM read us."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._vllm_labels = {"model_name": model, "engine": "0"}  # to its readers, all engines are one
        self.requests = RequestMetrics(self._vllm_labels, self.registry)
        self._add_requests(self.registry)
        self._add_handoffs(self.registry)
        self._add_planner(self.registry)
        self._add_workers(self.registry)
        self._add_http(self.registry)
        self._add_vllm_names(self.registry)
        self._show_zeros()

    def _add_requests(self, registry: CollectorRegistry) -> None:
        self.retries = Counter("dynrt_request_retries", "Requests moved to other workers", registry=registry)
        self.open_requests = Gauge("dynrt_open_requests", "Requests being served", registry=registry)
        self.prefill_tokens = Counter(
            "dynrt_prefill_tokens", "Prompt tokens by where their KV came from", ["source"], registry=registry
        )

    def _add_handoffs(self, registry: CollectorRegistry) -> None:
        self.handoffs = Counter("dynrt_handoffs", "Handoffs by outcome", ["outcome"], registry=registry)
        self.handoff_exposed_s = Histogram(
            "dynrt_handoff_exposed_seconds",
            "How much later decode can start than if the transfer had taken no time",
            buckets=EXPOSED_BUCKETS_S,
            registry=registry,
        )
        self.handoff_failures = Counter(
            "dynrt_handoff_failures",
            "Handoffs that were not committed, by reason",
            ["reason"],
            registry=registry,
        )
        self.handoff_retargets = Counter(
            "dynrt_handoff_retargets",
            "Finished prompts for which decode had no room, by where they went",
            ["outcome"],
            registry=registry,
        )
        self.decode_wait_s = Histogram(
            "dynrt_decode_wait_seconds",
            "From a handed-off prompt's last byte and first token to the decode step that goes on behind it",
            buckets=EXPOSED_BUCKETS_S,
            registry=registry,
        )
        self.decode_first_step_s = Histogram(
            "dynrt_decode_first_step_seconds",
            "The step that brings a handed-off prompt's second token",
            buckets=EXPOSED_BUCKETS_S,
            registry=registry,
        )
        self.first_decode_s = Histogram(
            "dynrt_first_decode_seconds",
            "From the end of prefill to decode's first own token: exposed transfer, wait and step",
            buckets=EXPOSED_BUCKETS_S,
            registry=registry,
        )
        self.kv_bytes_pushed = Counter("dynrt_kv_bytes_pushed", "KV cache bytes pushed", registry=registry)
        self.open_handoffs = Gauge("dynrt_open_handoffs", "Handoffs not yet over", registry=registry)
        self.oldest_handoff_s = Gauge(
            "dynrt_oldest_handoff_seconds", "Age of the oldest open handoff", registry=registry
        )
        self.quarantined_blocks = Gauge(
            "dynrt_quarantined_blocks",
            "Blocks reserved for handoffs that came to nothing, not yet known to be written to no more",
            registry=registry,
        )

    def _add_planner(self, registry: CollectorRegistry) -> None:
        self.plans = Counter("dynrt_plans", "Plans by kind of prefill", ["kind"], registry=registry)
        self.plan_reasons = Counter(
            "dynrt_plan_reasons", "Plans by what decided them", ["reason"], registry=registry
        )
        self.plan_refusals = Counter(
            "dynrt_plan_refusals",
            "Plans that were asked for and could not be made, by reason",
            ["reason"],
            registry=registry,
        )
        self.index_incomplete = Gauge(
            "dynrt_index_incomplete_workers",
            "Workers whose prefix index is empty until a snapshot",
            registry=registry,
        )
        self.index_bytes = Gauge(
            "dynrt_index_bytes", "Estimated memory of the prefix index", registry=registry
        )
        self.index_dropped_blocks = Counter(
            "dynrt_index_dropped_blocks",
            "Blocks that the prefix index dropped at its memory bound",
            registry=registry,
        )
        self._shown_dropped_blocks = 0

    def _add_workers(self, registry: CollectorRegistry) -> None:
        self.workers = Gauge("dynrt_workers", "Registered workers by role", ["role"], registry=registry)
        self.worker_losses = Counter("dynrt_worker_losses", "Workers that ended", ["role"], registry=registry)
        self.blocks = Gauge("dynrt_kv_blocks", "KV blocks by state", ["worker", "state"], registry=registry)
        self.worker_requests = Gauge(
            "dynrt_worker_requests", "Requests in an engine by state", ["worker", "state"], registry=registry
        )

    def _add_http(self, registry: CollectorRegistry) -> None:
        self.http_requests = Counter(
            "dynrt_http_requests", "HTTP requests by route and status", ["route", "status"], registry=registry
        )
        self.http_connections = Gauge(
            "dynrt_http_connections", "Open connections of clients", registry=registry
        )

    def _add_vllm_names(self, registry: CollectorRegistry) -> None:
        labels = self._vllm_labels

        def counter(name: str, text: str) -> Count:
            return Counter(f"vllm:{name}", text, list(labels), registry=registry).labels(*labels.values())

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, list(labels), registry=registry).labels(**labels)

        self.vllm_prompt_tokens = counter("prompt_tokens", "Prompt tokens processed")
        self.vllm_generation_tokens = counter("generation_tokens", "Tokens generated")
        self.vllm_cache_queries = counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache"
        )
        self.vllm_cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache")
        self.vllm_preemptions = counter("num_preemptions", "Requests preempted in engines")
        self.vllm_running = gauge("num_requests_running", "Requests in running batches")
        self.vllm_waiting = gauge("num_requests_waiting", "Requests waiting in engines")
        self.vllm_kv_usage = gauge("kv_cache_usage_perc", "Share of KV blocks in use (1: all)")

    def _show_zeros(self) -> None:
        """A counter that is absent until it counts breaks every rate() written for it."""
        for outcome in get_args(Outcome):
            self.handoffs.labels(outcome)
        for reason in get_args(Cause):
            self.handoff_failures.labels(reason)
        for retarget in get_args(Retargeted):
            self.handoff_retargets.labels(retarget)
        for source in ("computed", "cached"):
            self.prefill_tokens.labels(source)
        for kind in ("remote", "local"):
            self.plans.labels(kind)
        for refusal in get_args(RefusalKind):
            self.plan_refusals.labels(refusal)

    def show_index(self, num_bytes: int, dropped_blocks: int) -> None:
        """Memory now, and blocks dropped since the start."""
        self.index_bytes.set(num_bytes)
        self.index_dropped_blocks.inc(dropped_blocks - self._shown_dropped_blocks)
        self._shown_dropped_blocks = dropped_blocks

    def show_loads(self, loads: dict[str, EngineLoad]) -> None:
        """Set the gauges that come from the engines, by worker id."""
        self.blocks.clear()
        self.worker_requests.clear()
        for worker, load in loads.items():
            self.worker_requests.labels(worker, "running").set(load.running_requests)
            self.worker_requests.labels(worker, "waiting").set(load.waiting_requests)
            self.blocks.labels(worker, "active").set(load.blocks_active)
            self.blocks.labels(worker, "cached").set(load.blocks_cached)
            self.blocks.labels(worker, "total").set(load.blocks_total)
        total = sum(load.blocks_total for load in loads.values())
        self.vllm_kv_usage.set(sum(load.blocks_active for load in loads.values()) / max(1, total))
        self.vllm_running.set(sum(load.running_requests for load in loads.values()))
        self.vllm_waiting.set(sum(load.waiting_requests for load in loads.values()))

    def count_http(self, counts: HttpCounts) -> None:
        """What an endpoint has answered since it said so last."""
        for (route, status), count in counts.answers:
            self.http_requests.labels(route, str(status)).inc(count)
        self.http_connections.inc(counts.connections)

    def text(self) -> bytes:
        """In Prometheus' exposition format."""
        return generate_latest(self.registry)
