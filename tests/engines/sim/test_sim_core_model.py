"""Whatever comes in whatever order: every request gets its tokens, no wrong KV is read, and no block is left held."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from virtual_engine import VirtualEngine, expected_outputs, make_request, sim_config, write_model_config

from dynrt.engines.protocol import EngineRequest, Token

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=24)  # of few different tokens: prefixes are shared


class SimCoreMachine(RuleBasedStateMachine):
    """A prefill and a decode engine with small caches; both also take whole requests."""

    @initialize(kv_blocks=st.integers(9, 16), max_batch_tokens=st.integers(1, 20))
    def set_up(self, kv_blocks: int, max_batch_tokens: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            config = sim_config(
                write_model_config(Path(folder)), kv_blocks=kv_blocks, max_batch_tokens=max_batch_tokens
            )
            self.prefill, self.decode = VirtualEngine(config), VirtualEngine(config)
        self.requests: dict[bytes, EngineRequest] = {}
        self.sampled: dict[bytes, list[int]] = {}
        self.reserved: dict[bytes, EngineRequest] = {}
        self.number = 0

    def new_request(self, prompt_ids: list[int], max_tokens: int) -> EngineRequest:
        self.number += 1
        return make_request(self.number, prompt_ids, max_tokens, salt="ab"[self.number % 2])

    def take(self, tokens: list[Token]) -> None:
        for token in tokens:
            assert token.error is None
            if token.key in self.requests:
                self.sampled[token.key].append(token.token_id)
                if token.finish_reason is not None:
                    self.check(token.key)

    def check(self, key: bytes) -> None:
        request = self.requests.pop(key)
        assert self.sampled.pop(key) == expected_outputs(request.prompt_ids, request.sampling.max_tokens)

    @rule(prompt_ids=prompts, max_tokens=st.integers(1, 8), on_prefill=st.booleans())
    def submit(self, prompt_ids: list[int], max_tokens: int, on_prefill: bool) -> None:
        request = self.new_request(prompt_ids, max_tokens)
        self.requests[request.key], self.sampled[request.key] = request, []
        (self.prefill if on_prefill else self.decode).core.submit(request)

    @rule(prompt_ids=prompts, max_tokens=st.integers(2, 8))
    def hand_off(self, prompt_ids: list[int], max_tokens: int) -> None:
        """A prompt whose blocks wait, pushed, for the commit."""
        request = self.new_request(prompt_ids, max_tokens)
        reservation = self.decode.core.reserve(request)
        if reservation is None:
            return
        self.prefill.core.submit(msgspec.structs.replace(request, prefill_only=True))
        tokens = self.prefill.run()
        [first] = [token.token_id for token in tokens if token.key == request.key]
        self.take(tokens)
        self.prefill.push(request, self.decode, reservation)
        self.prefill.core.release(request.key, 0)
        self.sampled[request.key] = [first]
        self.reserved[request.key] = request

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), is_kept=st.booleans())
    def settle(self, data: st.DataObject, is_kept: bool) -> None:
        key = data.draw(st.sampled_from(sorted(self.reserved)))
        request = self.reserved.pop(key)
        if is_kept:
            self.requests[key] = request
            self.decode.core.commit(key, 0, self.sampled[key][0])
        else:
            self.decode.core.release(key, 0)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[key]
        self.prefill.core.cancel(key, 0)
        self.decode.core.cancel(key, 0)

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(self.prefill.step().tokens)
            self.take(self.decode.step().tokens)

    @invariant()
    def nothing_is_remembered_of_ended_requests(self) -> None:
        if hasattr(self, "requests"):
            for engine in (self.prefill, self.decode):
                load = engine.core.load()
                open_requests = load.running_requests + load.waiting_requests
                assert len(engine.core._contents) <= open_requests

    def teardown(self) -> None:
        if not hasattr(self, "requests"):
            return
        for key in self.reserved:
            self.decode.core.release(key, 0)
        for engine in (self.prefill, self.decode):
            self.take(engine.run())
            assert engine.core.load().blocks_active == 0
        assert self.requests == {}


TestSimCore = SimCoreMachine.TestCase
TestSimCore.settings = settings(max_examples=60, stateful_step_count=25)
