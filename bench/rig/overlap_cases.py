"""What bench/overlap.py measures: prompt lengths, chunks and links."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

TINY, SMALL, MEDIUM = (64, 4), (128, 8), (256, 12)  # hidden size, layers
RATIOS = (0.1, 0.5, 1.0, 2.0, 5.0)


class Case(msgspec.Struct, frozen=True):
    """One prompt length computed in chunks of so many tokens, over one kind of link."""

    tokens: int
    chunk: int
    link: str = "shared memory"  # or "tcp", or "throttled"
    ratio: float = 0.0  # throttled: a layer's transfer over its compute time, t/c
    runs: int = 30
    model: tuple[int, int] | None = SMALL  # None: a real one

    @property
    def name(self) -> str:
        link = f"t/c {self.ratio:g}" if self.ratio else self.link
        return f"{self.tokens} tokens in chunks of {self.chunk}, {link}"


SHARED = [
    Case(128, 2048),
    Case(512, 2048),
    Case(512, 128),
    Case(2000, 2048),
    Case(2000, 512),
    Case(6000, 6016, model=TINY),
    Case(6000, 2048, model=TINY),
]
SLOW = [Case(128, 2048), Case(512, 2048, runs=16), Case(2000, 2048, runs=6), Case(2000, 512, runs=6)]


def model_cases(*, quick: bool, engine: str) -> list[Case]:
    """A real model, over shared memory; vLLM, four engines of which share the machine, with the long prompt alone."""
    if quick:
        return [Case(512, 512, runs=5, model=None)]
    long = [Case(2000, chunk, model=None) for chunk in (512, 2048)]
    if engine == "vllm":
        return long
    return [Case(128, 2048, model=None), Case(512, 2048, model=None), *long]


def link_cases(*, quick: bool) -> list[Case]:
    """Random models, over all kinds of links."""
    return list(_quick_link_cases() if quick else _link_cases())


def _link_cases() -> Iterator[Case]:
    """The shared-memory cases come first: the throttled links are as slow as their compute asks."""
    yield from SHARED
    for case in (Case(128, 2048), Case(512, 2048), Case(2000, 512), Case(6000, 2048, model=TINY)):
        yield msgspec.structs.replace(case, link="tcp", runs=16)
    for case in SLOW:
        for ratio in RATIOS:
            yield msgspec.structs.replace(case, link="throttled", ratio=ratio)
    for ratio in (0.5, 2.0):
        yield Case(6000, 2048, "throttled", ratio, runs=4, model=TINY)
    yield Case(2000, 2048, runs=4, model=MEDIUM)
    for ratio in (0.1, 0.5):
        yield Case(2000, 2048, "throttled", ratio, runs=8, model=MEDIUM)


def _quick_link_cases() -> Iterator[Case]:
    yield Case(512, 128, runs=5)
    yield Case(512, 128, "throttled", 0.5, runs=5)
    yield Case(512, 128, "throttled", 2.0, runs=5)
