"""What a worker has to do: the planner's own tally by request, decode's raised where the worker reports more (sans-IO).

Prompt tokens that wait are not for workers to report: they would take waiting prompts in full, since hits are found
when a prompt is admitted. The tally knows these hits.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from dynrt.planner.coefficients import StepTimes


class LoadReport(Protocol):
    """A worker's load after a step, as runtime.messages.EngineLoad has it."""

    @property
    def blocks_active(self) -> int: ...


class _Prefill(msgspec.Struct):
    prompt_tokens: int
    left: int  # tokens at the prompt's end still to be computed
    context: int  # end² - start² of what is left: attention's share of it


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
        self.prefill_tokens = 0  # prompt tokens to be computed, waiting and running
        self.prefill_context = 0  # Σ(end² - start²) of the prompt tokens to be computed
        self.decode_requests = 0  # that decode here or will, once their prefill is done
        self._kv_tokens = self._new_kv_tokens = 0  # sums over _decodes
        self._reported_kv_tokens = 0  # that a decode step attends to
        self._reported_held_tokens = 0

    @property
    def decode_kv_tokens(self) -> int:
        """Tokens of KV that a decode step attends to."""
        own, reported = self._kv_tokens, self._reported_kv_tokens
        return own if own > reported else reported

    @property
    def held_tokens(self) -> int:
        """Tokens of KV that cannot be evicted, a shared prefix counted once."""
        own, reported = self.prefill_tokens + self._new_kv_tokens, self._reported_held_tokens
        return own if own > reported else reported

    def plan_prefill(self, key: bytes, prompt_tokens: int, uncached_tokens: int) -> None:
        assert 0 <= uncached_tokens <= prompt_tokens, (uncached_tokens, prompt_tokens)
        if key in self._prefills:
            self.end_prefill(key)
        context = prompt_tokens**2 - (prompt_tokens - uncached_tokens) ** 2
        self._prefills[key] = _Prefill(prompt_tokens, uncached_tokens, context)
        self.prefill_requests += 1
        self.prefill_tokens += uncached_tokens
        self.prefill_context += context

    def plan_decode(self, key: bytes, kv_tokens: int, new_kv_tokens: int) -> None:
        if key in self._decodes:
            self._end_decode(key)
        self._decodes[key] = _Decode(kv_tokens, new_kv_tokens)
        self.decode_requests += 1
        self._kv_tokens += kv_tokens
        self._new_kv_tokens += new_kv_tokens

    def end_prefill(self, key: bytes) -> None:
        """The request's first token is here, or its prefill is off."""
        prefill = self._prefills.pop(key, None)
        if prefill is None:
            return
        self.prefill_requests -= 1
        self.prefill_tokens -= prefill.left
        self.prefill_context -= prefill.context
        if not self._prefills:
            self._forget_reports()

    def end(self, key: bytes) -> None:
        """The request is over on this worker."""
        if key in self._prefills:
            self.end_prefill(key)
        if key in self._decodes:
            self._end_decode(key)

    def step(self, report: LoadReport, timing: StepTimes | None) -> None:
        """The worker's own count after a step, and what that computed; `timing` is None if it computed nothing."""
        self._reported_held_tokens = report.blocks_active * self._block_size
        if timing is not None:
            self._reported_kv_tokens = timing.decode_kv_tokens
            if timing.prefill_tokens:
                self._work_off(timing.prefill_tokens)
        if not self._decodes:
            self._forget_reports()

    def _work_off(self, computed_tokens: int) -> None:
        """So many prompt tokens: the oldest requests', since prefill is first come, first served."""
        for prefill in self._prefills.values():
            done = min(prefill.left, computed_tokens)
            start = prefill.prompt_tokens - prefill.left
            done_context = (start + done) ** 2 - start**2
            prefill.left -= done
            prefill.context -= done_context
            self.prefill_tokens -= done
            self.prefill_context -= done_context
            computed_tokens -= done
            if not computed_tokens:
                break

    def _end_decode(self, key: bytes) -> None:
        decode = self._decodes.pop(key)
        self.decode_requests -= 1
        self._kv_tokens -= decode.kv_tokens
        self._new_kv_tokens -= decode.new_kv_tokens
        if not self._decodes:
            self._forget_reports()

    def _forget_reports(self) -> None:
        """Reports lag behind, and an idle worker sends none that could correct the last one."""
        if not self._decodes:
            self._reported_kv_tokens = 0
            if not self._prefills:
                self._reported_held_tokens = 0
