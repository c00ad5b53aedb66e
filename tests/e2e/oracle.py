"""transformers as the oracle: what it would have answered, and how sure it was of each token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from served_runtime import Answer

NUMERIC_MARGIN = 1e-3  # below it, the kernels of other shapes may choose the other of the two best tokens


class Judgement(msgspec.Struct, frozen=True):
    """transformers' view of an answer, position by position, each given all tokens of that answer before it."""

    best_ids: list[int]
    margins: list[float]  # between its two best logits


class Oracle:
    """A causal language model as transformers loads it from a directory, in float32."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()

    @torch.inference_mode()
    def judge(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> Judgement:
        """One forward over prompt and answer: as good as generating greedily, at a fraction of the cost."""
        known_ids = torch.tensor([[*prompt_ids, *output_ids[:-1]]])
        logits = self._model(known_ids, use_cache=False, logits_to_keep=len(output_ids)).logits[0]
        best = logits.topk(2, dim=-1)
        margins = (best.values[:, 0] - best.values[:, 1]).tolist()
        return Judgement(best.indices[:, 0].tolist(), margins)

    @torch.inference_mode()
    def next_ids(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """The best token behind each of several prompts of the same length."""
        logits = self._model(torch.tensor(prompts), use_cache=False, logits_to_keep=1).logits
        return [int(best) for best in logits[:, -1].argmax(dim=-1)]


class Reference(msgspec.Struct, frozen=True):
    """An answer to compare others with, and how sure transformers was of each of its tokens."""

    prompt_ids: list[int]
    output_ids: list[int]
    judgement: Judgement


References = dict[str, Reference]


def judged(model_dir: Path, prompts: dict[str, list[int]], answers: dict[str, Answer]) -> References:
    """Each prompt with its answer and transformers' view of that."""
    oracle = Oracle(model_dir)
    return {
        name: Reference(prompts[name], answer.token_ids, oracle.judge(prompts[name], answer.token_ids))
        for name, answer in answers.items()
    }


def assert_judged_right(name: str, reference: Reference) -> None:
    """Each token is transformers' own choice, unless its two best are within NUMERIC_MARGIN."""
    judgement = reference.judgement
    for position, (ours, best, margin) in enumerate(
        zip(reference.output_ids, judgement.best_ids, judgement.margins, strict=True)
    ):
        if margin <= NUMERIC_MARGIN:
            print(f"{name}, output {position}: transformers' margin is {margin:.2e}")
        elif ours != best:
            raise AssertionError(f"{name}, output {position}: {ours}; transformers: {best} by {margin:.2e}")


def assert_same(name: str, reference: Reference, output_ids: Sequence[int]) -> None:
    """The same tokens as the reference's, up to a difference where the margin is at most NUMERIC_MARGIN."""
    assert len(output_ids) == len(reference.output_ids), f"{name}: {len(output_ids)} tokens"
    pairs = zip(reference.output_ids, output_ids, strict=True)
    differing = next((position for position, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
    if differing is None:
        return
    margin = reference.judgement.margins[differing]
    told = f"{name}, output {differing}: {output_ids[differing]}, not {reference.output_ids[differing]}"
    assert margin <= NUMERIC_MARGIN, f"{told}, which was better by {margin:.2e}"
    print(f"{told}; the margin is {margin:.2e}, and nothing behind it is compared")


def assert_all_same(references: References, answers: dict[str, Answer]) -> None:
    """`assert_same` for each of the answers."""
    for name, answer in answers.items():
        assert_same(name, references[name], answer.token_ids)
