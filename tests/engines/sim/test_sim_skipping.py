"""Skipped steps: the same course as without skipping, cut where something comes up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_engine import PROFILE, make_request, sim_config, write_model_config

from dynrt.engines.sim.skipping import SkippingCore
from dynrt.planner.events import CacheEvent

NUM_BLOCKS = 40

Requests = list[tuple[float, int, int]]  # when it comes, prompt tokens, output tokens


@pytest.fixture(scope="module")
def limits_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_config(tmp_path_factory.mktemp("limits"))


class Course:
    """A core in virtual time, given requests between its steps, and what it told."""

    def __init__(self, model_dir: Path, longest_stretch: int) -> None:
        config = sim_config(model_dir, kv_blocks=NUM_BLOCKS)
        self.core = SkippingCore(config, PROFILE, longest_stretch)
        self.now = 0.0
        self.num_steps = 0
        self.ended_at: dict[bytes, float] = {}
        self.cache_events: list[CacheEvent] = []

    def run(self, requests: Requests) -> None:
        coming = [
            (at, make_request(number, [number + 1] * tokens, outputs))
            for number, (at, tokens, outputs) in enumerate(sorted(requests))
        ]
        while coming or self.core.has_work():
            if not self.core.has_work():
                self.now = max(self.now, coming[0][0])
            while coming and coming[0][0] <= self.now:
                self.core.submit(coming.pop(0)[1])
            self._step(coming[0][0] if coming else float("inf"))

    def _step(self, next_at: float) -> None:
        self.num_steps += 1
        stretch = self.core.plan_stretch(self.now)
        if stretch is not None:
            stretch.cut(next_at)
            self.now = stretch.ends_at
            output = self.core.finish_stretch(stretch)
        else:
            step = self.core.plan_step(self.now)
            self.now = step.ends_at
            output = self.core.finish_step(step, self.now)
        self.cache_events += output.cache_events
        self.ended_at |= {token.key: self.now for token in output.tokens if token.finish_reason is not None}


@settings(max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.floats(0.0, 0.5), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=8
    ),
    longest_stretch=st.integers(1, 50),
)
def test_skipping_changes_nothing_but_the_number_of_steps(
    limits_dir: Path, requests: Requests, longest_stretch: int
) -> None:
    step_by_step, skipping = Course(limits_dir, 0), Course(limits_dir, longest_stretch)
    step_by_step.run(requests)
    skipping.run(requests)
    assert skipping.ended_at == step_by_step.ended_at
    assert skipping.cache_events == step_by_step.cache_events
    assert skipping.core.load() == step_by_step.core.load()
    assert skipping.num_steps <= step_by_step.num_steps


def test_an_answer_within_a_block_is_three_steps(limits_dir: Path) -> None:
    """Its prompt with the first token, all but the last token, and the last."""
    course = Course(limits_dir, 50)
    course.core = SkippingCore(sim_config(limits_dir, block_size=64, kv_blocks=4), PROFILE)
    course.run([(0.0, 10, 40)])
    assert course.num_steps == 3


def test_a_cut_keeps_the_step_that_runs(limits_dir: Path) -> None:
    course = Course(limits_dir, 50)
    course.core = SkippingCore(sim_config(limits_dir, block_size=64, kv_blocks=4), PROFILE)
    course.core.submit(make_request(1, [7] * 10, 40))
    step = course.core.plan_step(0.0)
    course.core.finish_step(step, step.ends_at)
    stretch = course.core.plan_stretch(step.ends_at)
    assert stretch is not None
    assert len(stretch.ends) == 38
    third_ends_at = stretch.ends[2]
    stretch.cut(third_ends_at - 1e-9)
    assert (len(stretch.ends), stretch.ends_at) == (3, third_ends_at)
    output = course.core.finish_stretch(stretch)
    assert output.timing is not None
    assert output.timing.duration_s == pytest.approx(stretch.ends[2] - stretch.ends[1])
    assert output.timing.decode_kv_tokens == 10 + 3
