"""The prompts of the equality tests: token ids by name."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from dynrt.runtime.messages import unpack_ids
from dynrt.runtime.prompts import PromptEncoder

BLOCK_SIZE = 32

_WHO = (
    "The miller",
    "A young captain",
    "Her brother",
    "The old teacher",
    "Nobody",
    "Every sailor",
    "My neighbour",
)
_DID = ("sold", "found", "painted", "lost", "carried", "remembered", "hid")
_WHAT = ("three sheep", "a letter", "the red boat", "his coat", "a basket of apples", "the map", "some bread")
_WHERE = ("at the market", "behind the church", "on the way home", "near the river", "in the kitchen")


def prose(seed: int, num_sentences: int) -> str:
    """Plain English that goes on and on without repeating itself."""
    return " ".join(_sentences(random.Random(seed), num_sentences))


def _sentences(rng: random.Random, count: int) -> Iterator[str]:
    for day in range(1, count + 1):
        choices = [rng.choice(words) for words in (_WHO, _DID, _WHAT, _WHERE)]
        yield f"{choices[0]} {choices[1]} {choices[2]} {choices[3]} on day {day}."


def language_prompts(model_dir: Path) -> dict[str, list[int]]:
    """For a real model: raw and chat, 20 to 3,000 tokens, around multiples of a block, some with shared prefixes."""
    encoder = PromptEncoder.from_dir(model_dir)
    story, other = (unpack_ids(encoder.encode(prose(seed, 250), add_special_tokens=True)) for seed in (1, 2))
    assert len(story) >= 3000, f"the story has {len(story)} tokens"
    raw = {f"raw of {n}": story[:n] for n in (20, 31, 32, 33, 255, 256, 257, 1000)}
    raw |= {"raw of 640": other[:640], "raw of 3000": story[1000:] + other[: 4000 - len(story)]}
    return raw | {
        name: unpack_ids(encoder.encode_chat(messages)) for name, messages in _conversations().items()
    }


def _conversations() -> dict[str, list[dict[str, str]]]:
    system = {"role": "system", "content": f"You know this story by heart. {prose(3, 20)}"}
    question = {"role": "user", "content": "Who was near the river, and why?"}
    answer = {"role": "assistant", "content": "The miller was, as he had lost his coat there."}
    return {
        "chat": [{"role": "user", "content": "Name three colours of the sky, with a reason for each."}],
        "chat with a system prompt": [system, question],
        "chat with the same system prompt": [system, {"role": "user", "content": "Tell me how it ends."}],
        "chat of several turns": [system, question, answer, {"role": "user", "content": "And then?"}],
    }


def random_prompts() -> dict[str, list[int]]:
    """For tiny models of random weights: 1 token to 20 blocks, around multiples of a block, some sharing prefixes."""
    rng = random.Random(5)
    prompts = {f"{n} tokens": random_ids(rng, n) for n in (1, 2, 31, 32, 33, 63, 64, 65, 100, 257, 640)}
    shared = random_ids(rng, 3 * BLOCK_SIZE)
    prompts |= {f"96 shared and {n} more": shared + random_ids(rng, n) for n in (1, 31, 32, 50)}
    return prompts


def random_ids(rng: random.Random, count: int) -> list[int]:
    """Of the tiny model's tokens, none of them special."""
    return [rng.randrange(5, 512) for _ in range(count)]
