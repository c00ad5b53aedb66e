"""What a worker has to do: the planner's own tally by request, decode's raised where the worker reports more (sans-IO).

Prompt tokens that wait are not for workers to report: they would take waiting prompts in full, since hits are found
when a prompt is admitted. The tally knows these hits.
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class LoadReport(Protocol):
    """A worker's load after a step, as runtime.messages.EngineLoad has it."""

    @property
    def blocks_active(self) -> int: ...


class _Prefill(msgspec.Struct):
    prompt_tokens: int
    left: int  # tokens at the prompt's end still to be computed

    @property
    def context(self) -> int:
        """end² - start² of what is left: attention's share of it."""
        return self.prompt_tokens**2 - (self.prompt_tokens - self.left) ** 2


class _Decode(msgspec.Struct, frozen=True):
    kv_tokens: int  # of the prompt
    new_kv_tokens: int  # those that the worker did not hold before


class Load:
    """One worker's load. Every update is idempotent; without open requests everything is exactly zero."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prefills: dict[bytes, _Prefill] = {}  # in the order in which they were planned
        self._decodes: dict[bytes, _Decode] = {}
        self.prefill_requests = 0
        self.decode_requests = 0  # that decode here or will, once their prefill is done
        self._tokens = self._context = 0  # sums over _prefills
        self._kv_tokens = self._new_kv_tokens = 0  # sums over _decodes
        self._reported_decode_kv_tokens = 0
        self._reported_held_tokens = 0

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens to be computed, waiting and running."""
        return self._tokens

    @property
    def prefill_context(self) -> int:
        """Σ(end² - start²) of the prompt tokens to be computed."""
        return self._context

    @property
    def decode_kv_tokens(self) -> int:
        """Tokens of KV that a decode step attends to."""
        own, reported = self._kv_tokens, self._reported_decode_kv_tokens
        return own if own > reported else reported

    @property
    def held_tokens(self) -> int:
        """Tokens of KV that cannot be evicted, a shared prefix counted once."""
        own, reported = self._tokens + self._new_kv_tokens, self._reported_held_tokens
        return own if own > reported else reported

    def plan_prefill(self, key: bytes, prompt_tokens: int, uncached_tokens: int) -> None:
        assert 0 <= uncached_tokens <= prompt_tokens, (uncached_tokens, prompt_tokens)
        self.end_prefill(key)
        prefill = self._prefills[key] = _Prefill(prompt_tokens, uncached_tokens)
        self.prefill_requests = len(self._prefills)
        self._tokens += prefill.left
        self._context += prefill.context

    def plan_decode(self, key: bytes, kv_tokens: int, new_kv_tokens: int) -> None:
        self._end_decode(key)
        self._decodes[key] = _Decode(kv_tokens, new_kv_tokens)
        self.decode_requests = len(self._decodes)
        self._kv_tokens += kv_tokens
        self._new_kv_tokens += new_kv_tokens

    def end_prefill(self, key: bytes) -> None:
        """The request's first token is here, or its prefill is off."""
        prefill = self._prefills.pop(key, None)
        if prefill is not None:
            self.prefill_requests = len(self._prefills)
            self._tokens -= prefill.left
            self._context -= prefill.context
        self._forget_reports_if_idle()

    def end(self, key: bytes) -> None:
        """The request is over on this worker."""
        self.end_prefill(key)
        self._end_decode(key)
        self._forget_reports_if_idle()

    def report(self, load: LoadReport) -> None:
        """The worker's own count after a step."""
        self._reported_held_tokens = load.blocks_active * self._block_size
        self._forget_reports_if_idle()

    def step(self, prefill_tokens: int, decode_kv_tokens: int) -> None:
        """A step computed so many prompt tokens: the oldest requests', since prefill is first come, first served."""
        self._reported_decode_kv_tokens = decode_kv_tokens
        for prefill in self._prefills.values():
            if not prefill_tokens:
                break
            done = min(prefill.left, prefill_tokens)
            context_before = prefill.context
            prefill.left -= done
            prefill_tokens -= done
            self._tokens -= done
            self._context -= context_before - prefill.context
        self._forget_reports_if_idle()

    def _end_decode(self, key: bytes) -> None:
        decode = self._decodes.pop(key, None)
        if decode is not None:
            self.decode_requests = len(self._decodes)
            self._kv_tokens -= decode.kv_tokens
            self._new_kv_tokens -= decode.new_kv_tokens

    def _forget_reports_if_idle(self) -> None:
        """Reports lag behind, and an idle worker sends none that could correct the last one."""
        if not self._decodes:
            self._reported_decode_kv_tokens = 0
        if not self._prefills and not self._decodes:
            self._reported_held_tokens = 0
