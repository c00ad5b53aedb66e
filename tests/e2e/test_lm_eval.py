"""lm-eval, which nobody here wrote: its scores are those of one engine alone when prefill and decode are apart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from client_environment import client_python, printed_by
from live_server import Command, client_of, metrics_of, serving

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),  # the first time, the environment is built
]

MODEL = "smollm2-135m"
RUN_S = 200.0
COMMITTED = 'dynrt_handoffs_total{outcome="committed"}'
QUESTIONS: list[dict[str, Any]] = [
    {"question": "What is the capital of France?", "choices": ["Paris", "Berlin", "Rome"], "answer": 0},
    {"question": "What color is the sky on a clear day?", "choices": ["green", "blue", "red"], "answer": 1},
    {"question": "How many legs has a spider?", "choices": ["four", "six", "eight"], "answer": 2},
    {"question": "Which of these is a fruit?", "choices": ["table", "river", "apple"], "answer": 2},
    {"question": "What do bees make?", "choices": ["honey", "milk", "paper"], "answer": 0},
    {"question": "Was kostet ein Kaffee in Zürich? ☕", "choices": ["fünf Franken", "ein Ei"], "answer": 0},
]
ASKED: dict[str, Any] = {
    "dataset_path": "json",
    "test_split": "test",
    "fewshot_split": "test",
    "num_fewshot": 2,
    "fewshot_config": {"sampler": "first_n"},
    "doc_to_text": "Question: {{question}}\nAnswer:",
}
TASKS: dict[str, dict[str, Any]] = {
    "toy_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "toy_generate": {
        "output_type": "generate_until",
        "doc_to_target": " {{choices[answer]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Command, Command]]:
    """Of prefill and decode apart, and of one engine alone."""
    folder = tmp_path_factory.mktemp("lm_eval")
    async with AsyncExitStack() as running:
        apart = serving(folder / "apart", "--threads", 1, "--local-prefill", "never")
        alone = serving(folder / "alone", "--threads", 1, "--prefill", 0)
        yield await running.enter_async_context(apart), await running.enter_async_context(alone)


@pytest.fixture(scope="module")
def lm_eval() -> Path:
    """Without transformers: it uses the server's tokenizer."""
    return client_python("lm-eval", ["lm-eval[api]==0.4.13"]).with_name("lm_eval")


def write_tasks(folder: Path) -> None:
    """In JSON, which is YAML as well."""
    folder.mkdir()
    (folder / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    data = {"dataset_kwargs": {"data_files": {"test": str(folder / "questions.jsonl")}}}
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **ASKED, **data, **task}))


class Scores:
    """What one run came to: metrics by task, and of each question the answers that they were computed from."""

    def __init__(self, folder: Path) -> None:
        [results] = folder.rglob("results_*.json")
        self.metrics = json.loads(results.read_text())["results"]
        self.choices = self._responses(folder, "toy_choice")
        self.texts = self._responses(folder, "toy_generate")

    def _responses(self, folder: Path, task: str) -> list[Any]:
        [samples] = folder.rglob(f"samples_{task}_*.jsonl")
        return [json.loads(line)["filtered_resps"] for line in samples.read_text().splitlines()]

    def loglikelihoods(self) -> list[float]:
        return [float(value) for question in self.choices for value, _ in question]

    def greedy(self) -> list[str]:
        return [is_greedy for question in self.choices for _, is_greedy in question]


async def scores(lm_eval: Path, server: Command, folder: Path) -> Scores:
    write_tasks(folder / "tasks")
    model = f"model={MODEL},base_url={server.url}/v1/completions,tokenized_requests=True,num_concurrent=2"
    await printed_by(
        *("env", f"HF_HOME={folder}/hub", "HF_HUB_OFFLINE=1", "HF_DATASETS_OFFLINE=1"),
        *(lm_eval, "--model", "local-completions", "--model_args", model, "--batch_size", 2),
        *("--include_path", folder / "tasks", "--tasks", ",".join(TASKS)),
        *("--output_path", folder / "out", "--log_samples"),
        deadline_s=RUN_S,
    )
    return Scores(folder / "out")


async def test_scores_are_those_of_one_engine_alone(
    lm_eval: Path, servers: tuple[Command, Command], tmp_path: Path
) -> None:
    for name in ("apart", "alone"):
        (tmp_path / name).mkdir()
    apart, alone = await asyncio.gather(
        scores(lm_eval, servers[0], tmp_path / "apart"), scores(lm_eval, servers[1], tmp_path / "alone")
    )
    assert apart.metrics == alone.metrics
    assert apart.texts == alone.texts and apart.greedy() == alone.greedy()
    assert apart.loglikelihoods() == pytest.approx(alone.loglikelihoods(), abs=1e-4)
    assert alone.metrics["toy_choice"]["acc,none"] > 0.5, "what is compared is better than chance"
    assert alone.metrics["toy_generate"]["exact_match,none"] > 0
    async with client_of(servers[0].url) as session:
        assert (await metrics_of(session))[COMMITTED] >= len(QUESTIONS), "decode had prefill's KV"
