"""Where prefill ends and decode begins: the first token, sampling, the ways to end there, and what is counted.

On a tiny model; the same requests to a pair of engines and to one engine that does both.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from oracle import Oracle
from prompt_set import BLOCK_SIZE, random_ids
from served_runtime import ServedRuntime, serve

from dynrt.runtime import RuntimeConfig
from dynrt.runtime.channel import OnMessage
from dynrt.runtime.messages import FromEngine, StepReport, TokenDelta
from dynrt.runtime.zmq_channel import ZmqChannel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]

SEARCHED_AT_ONCE = 1024
LETTER_IDS = range(5, 31)  # of the tiny model: a to z
END_IDS = (1, 4)  # of the tiny model: </s> and <|im_end|>
BLOCK_BYTES = 4 * 2 * BLOCK_SIZE * 2 * 16 * 4  # layers, K and V, tokens, KV heads, head size, float32


class SeedLog(random.Random):
    """Randomness that remembers the sampling seeds drawn from it."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seeds: list[int] = []

    def getrandbits(self, k: int, /) -> int:
        drawn = super().getrandbits(k)
        if k == 63:  # the only one of this width
            self.seeds.append(drawn)
        return drawn


class OtherFirstTokens(ZmqChannel):
    """A control socket on which each request's first token arrives as another one than prefill sampled."""

    def __init__(self, token_id: int) -> None:
        super().__init__()
        self._token_id = token_id
        self._begun: set[bytes] = set()

    def open(self, on_message: OnMessage) -> None:
        super().open(lambda incarnation, message: on_message(incarnation, self._exchange(message)))

    def _exchange(self, message: FromEngine) -> FromEngine:
        if not isinstance(message, StepReport):
            return message
        return msgspec.structs.replace(message, deltas=[self._exchanged(delta) for delta in message.deltas])

    def _exchanged(self, delta: TokenDelta) -> TokenDelta:
        if delta.key in self._begun:
            return delta
        self._begun.add(delta.key)
        return msgspec.structs.replace(delta, token_ids=[self._token_id])


def config_for(model_dir: Path, num_prefill: int = 1) -> RuntimeConfig:
    return RuntimeConfig(model=str(model_dir), dtype="float32", local_prefill="never", prefill=num_prefill)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def aggregated(tiny_model_dir: Path) -> AsyncIterator[ServedRuntime]:
    async with serve(config_for(tiny_model_dir, num_prefill=0)) as served:
        yield served


@pytest.fixture(scope="module")
def seed_log() -> SeedLog:
    return SeedLog(3)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tiny_model_dir: Path, seed_log: SeedLog) -> AsyncIterator[ServedRuntime]:
    async with serve(config_for(tiny_model_dir), randomness=seed_log) as served:
        yield served


@pytest.fixture
def prompt_ids(request: pytest.FixtureRequest) -> list[int]:
    """One for each test, so that none finds another's KV."""
    return random_ids(random.Random(request.node.name), 75)


@pytest.fixture(scope="module")
def ending_prompt(tiny_model_dir: Path) -> list[int]:
    """The first three letters behind which the model's best token is the end of sequence."""
    return next(_ending_prompts(Oracle(tiny_model_dir)))


def _ending_prompts(oracle: Oracle) -> Iterator[list[int]]:
    triples = [list(ids) for ids in itertools.product(LETTER_IDS, repeat=3)]
    for first in range(0, len(triples), SEARCHED_AT_ONCE):
        batch = triples[first : first + SEARCHED_AT_ONCE]
        for prompt_ids, next_id in zip(batch, oracle.next_ids(batch), strict=True):
            if next_id in END_IDS:
                yield prompt_ids


# --- the first token and those behind it ------------------------------------------------------------------


async def test_decode_goes_on_from_what_the_client_saw(
    tiny_model_dir: Path, aggregated: ServedRuntime, prompt_ids: list[int]
) -> None:
    """Whatever that is: here the client is shown, at temperature 0, a token that is not the best one."""
    (best,) = (await aggregated.answer(prompt_ids, max_tokens=1)).token_ids
    shown = best + 1 if best < 511 else 5
    expected = await aggregated.answer([*prompt_ids, shown], max_tokens=63)
    async with serve(config_for(tiny_model_dir), channel=OtherFirstTokens(shown)) as exchanged:
        answer = await exchanged.answer(prompt_ids)
    assert answer.token_ids == [shown, *expected.token_ids]


async def test_unseeded_sampling_is_one_sequence_over_both_workers(
    pair: ServedRuntime, aggregated: ServedRuntime, seed_log: SeedLog, prompt_ids: list[int]
) -> None:
    """A token is a function of logits, seed and position: one engine with the seed drawn must make the same."""
    seed_log.seeds.clear()
    answers = [await pair.answer(prompt_ids, temperature=1.0, max_tokens=24) for _ in range(6)]
    assert len({tuple(answer.token_ids) for answer in answers}) == len(answers), "draws are independent"
    for seed, answer in zip(seed_log.seeds, answers, strict=True):
        expected = await aggregated.answer(prompt_ids, temperature=1.0, max_tokens=24, seed=seed, seeded=True)
        assert answer.first_seen == expected.token_ids[:1]
        assert answer.token_ids == expected.token_ids


@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.9}, {"temperature": 1.7, "top_p": 0.5}])
async def test_seeded_sampling_is_the_same_in_any_company(
    pair: ServedRuntime, aggregated: ServedRuntime, prompt_ids: list[int], filters: dict[str, Any]
) -> None:
    asked = {"temperature": 1.0, "seed": 42, "seeded": True, **filters}
    alone = await aggregated.answer(prompt_ids, **asked)
    others = [random_ids(random.Random(i), 10 + 20 * i) for i in range(6)]
    for served in (aggregated, pair):
        async with asyncio.TaskGroup() as company:
            for other in others:
                company.create_task(served.answer(other, temperature=1.0))
            answer = await served.answer(prompt_ids, **asked)
        assert (answer.token_ids, answer.text) == (alone.token_ids, alone.text)


async def test_a_client_sees_the_first_token_before_the_others(
    pair: ServedRuntime, prompt_ids: list[int]
) -> None:
    answer = await pair.answer(prompt_ids)
    assert answer.first_seen == answer.token_ids[:1]


# --- requests that end at the junction --------------------------------------------------------------------


async def test_one_token_needs_no_decode(
    pair: ServedRuntime, aggregated: ServedRuntime, prompt_ids: list[int]
) -> None:
    expected = await aggregated.answer(prompt_ids, max_tokens=1)
    with_outcomes = HandoffCount(pair)
    answer = await pair.answer(prompt_ids, max_tokens=1)
    assert (answer.token_ids, answer.text, answer.finish_reason) == (
        expected.token_ids,
        expected.text,
        "length",
    )
    assert await with_outcomes.since() == {"cancelled": 1}


async def test_two_tokens_need_it(
    pair: ServedRuntime, aggregated: ServedRuntime, prompt_ids: list[int]
) -> None:
    expected = await aggregated.answer(prompt_ids, max_tokens=2)
    with_outcomes = HandoffCount(pair)
    answer = await pair.answer(prompt_ids, max_tokens=2)
    assert (answer.token_ids, answer.finish_reason) == (expected.token_ids, "length")
    assert await with_outcomes.since() == {"committed": 1}


async def test_end_of_sequence_as_first_token(
    pair: ServedRuntime, aggregated: ServedRuntime, ending_prompt: list[int]
) -> None:
    expected = await aggregated.answer(ending_prompt, ignore_eos=False)
    with_outcomes = HandoffCount(pair)
    answer = await pair.answer(ending_prompt, ignore_eos=False)
    assert answer == expected
    assert len(answer.token_ids) == 1 and answer.token_ids[0] in END_IDS
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("", "stop", None)
    assert await with_outcomes.since() == {"cancelled": 1}


async def test_end_of_sequence_as_first_token_can_be_passed_over(
    pair: ServedRuntime, aggregated: ServedRuntime, ending_prompt: list[int]
) -> None:
    for how in ({"ignore_eos": True}, {"ignore_eos": False, "min_tokens": 5}):
        expected = await aggregated.answer(ending_prompt, max_tokens=5, **how)
        answer = await pair.answer(ending_prompt, max_tokens=5, **how)
        assert len(answer.token_ids) == 5
        assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)


@pytest.mark.parametrize(("position", "outcome"), [(0, "cancelled"), (1, "committed")])
async def test_stop_token(
    pair: ServedRuntime, aggregated: ServedRuntime, prompt_ids: list[int], position: int, outcome: str
) -> None:
    token_ids = (await aggregated.answer(prompt_ids)).token_ids
    assert token_ids.index(token_ids[position]) == position
    with_outcomes = HandoffCount(pair)
    answer = await pair.answer(prompt_ids, stop_token_ids=(token_ids[position],))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", token_ids[position])
    assert answer.token_ids == token_ids[: position + 1]
    assert await with_outcomes.since() == {outcome: 1}


# --- what is counted --------------------------------------------------------------------------------------


class HandoffCount:
    """Handoffs by outcome since this was made."""

    def __init__(self, served: ServedRuntime) -> None:
        self._served = served
        self._before = self._now()

    async def since(self) -> dict[str, float]:
        """Outcomes that are not 0, once all is settled."""
        await self._served.settle()
        counts = {outcome: count - self._before[outcome] for outcome, count in self._now().items()}
        return {outcome: count for outcome, count in counts.items() if count}

    def _now(self) -> dict[str, float]:
        outcomes = ("committed", "cancelled", "fenced", "failed")
        return {outcome: self._served.metric("dynrt_handoffs_total", outcome=outcome) for outcome in outcomes}


async def test_metrics_of_a_known_request(tiny_model_dir: Path, prompt_ids: list[int]) -> None:
    """75 tokens are 2 blocks and a begun one. The second time, prefill holds 64 of them and so does decode."""
    async with serve(config_for(tiny_model_dir)) as served:
        assert known_metrics(served) == [0, 0, 0, 0, 0, 0]
        await served.answer(prompt_ids)
        await served.settle()
        assert known_metrics(served) == [1, 3 * BLOCK_BYTES, 1, 75, 0, 1]
        answer = await served.answer(prompt_ids)
        await served.settle()
        assert answer.cached_tokens == 64
        assert known_metrics(served) == [2, 4 * BLOCK_BYTES, 2, 75 + 11, 64, 2]


def known_metrics(served: ServedRuntime) -> list[float]:
    return [
        served.metric("dynrt_handoffs_total", outcome="committed"),
        served.metric("dynrt_kv_bytes_pushed_total"),
        served.metric("dynrt_handoff_exposed_seconds_count"),
        served.metric("dynrt_prefill_tokens_total", source="computed"),
        served.metric("dynrt_prefill_tokens_total", source="cached"),
        served.metric("dynrt_plans_total", kind="remote"),
    ]
