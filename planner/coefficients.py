"""What the steps of each worker cost, fitted online from the steps themselves (sans-IO).

A step takes `step_ms + prefill_token_ms · tokens + prefill_context_ms · Σ(end² - start²) + decode_request_ms ·
requests + decode_kv_token_ms · tokens of KV they attend to`: least squares of the *relative* error, so that short
steps count as much as long ones and a stall, being long, counts little. No coefficient is ever negative.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

FORGETTING = 0.995  # a sample's weight falls to 1/e over 200 later ones of its kind
PRIOR_WEIGHT = 1e-5  # with steps that scatter by 10 %, a prior that may be off by a factor of 30
LEARN_ALL = 64  # steps of a kind, of those with prefill and those without; later ones are alike
LEARN_EVERY = 4  # of them: a sample takes the runtime's event loop 15 µs
REFIT_EVERY = 8  # samples, after the first 8
ROUNDING = 1e-15  # of sums of numbers up to 1
PASS_ON_EVERY = 256  # samples of all workers between updates of everybody's prior


class StepTimes(Protocol):
    """One step's duration and work, as runtime.messages.StepTiming has them."""

    @property
    def duration_s(self) -> float: ...
    @property
    def prefill_tokens(self) -> int: ...
    @property
    def prefill_context(self) -> int: ...
    @property
    def decode_requests(self) -> int: ...
    @property
    def decode_kv_tokens(self) -> int: ...


class Coefficients(msgspec.Struct, frozen=True):
    """See the module; all in milliseconds, none negative."""

    step_ms: float
    prefill_token_ms: float
    prefill_context_ms: float
    decode_request_ms: float
    decode_kv_token_ms: float


def assumed_coefficients(kv_bytes_per_token: int) -> Coefficients:
    """Before anything was measured: 10 tokens/ms, and what depends on KV scaled by its size.

    An 8-billion-parameter model with 128 KiB of KV a token spends 6 % of a 4096-token prefill on attention; decode
    reads KV at 100 GB/s.
    """
    assert kv_bytes_per_token > 0, kv_bytes_per_token
    return Coefficients(
        step_ms=5.0,
        prefill_token_ms=0.1,
        prefill_context_ms=kv_bytes_per_token / 1e11,
        decode_request_ms=0.1,
        decode_kv_token_ms=kv_bytes_per_token / 1e8,
    )


class StepFit:
    """The least-squares fit of one series of steps.

    Steps with and without prefill are forgotten apart, lest thousands of decode steps wash out what a prefill costs.
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self._seen = [0, 0]  # steps without prefill, steps with
        self._with_prefill = _NormalEquations()
        self._decode_only = _NormalEquations()

    def wants(self, step: StepTimes) -> bool:
        """Whether this one is to be added: of the many alike, one in LEARN_EVERY is enough."""
        kind = step.prefill_tokens > 0
        self._seen[kind] += 1
        return self._seen[kind] <= LEARN_ALL or self._seen[kind] % LEARN_EVERY == 0

    def add(self, step: StepTimes, terms: list[float]) -> None:
        """`terms` are `terms_of(step)`."""
        equations = self._with_prefill if step.prefill_tokens else self._decode_only
        equations.add(terms)
        self.num_samples += 1

    def solve(self, prior: Coefficients) -> Coefficients:
        """The fit, drawn slightly towards `prior`, which alone decides what no step has shown yet."""
        expected = msgspec.structs.astuple(prior)
        sums = [a + b for a, b in zip(self._with_prefill.sums, self._decode_only.sums, strict=True)]
        matrix = [[sums[place] for place in row] for row in _SQUARE]
        vector = sums[len(_UPPER) :]
        for index, value in enumerate(expected):
            matrix[index][index] += PRIOR_WEIGHT / value**2
            vector[index] += PRIOR_WEIGHT / value
        return Coefficients(*_solve_nonnegative(matrix, vector))


class FleetFit:
    """The fits of all workers of one model. Together they are the prior of each, so a new worker starts sane and a
    decode worker that never prefilled is believed to do it like the others.
    """

    def __init__(self) -> None:
        self._assumed: Coefficients | None = None
        self._prior: Coefficients | None = None
        self._together = StepFit()
        self._fits: dict[str, StepFit] = {}
        self.coefficients: dict[str, Coefficients] = {}  # by worker, to be looked at

    def add_worker(self, name: str, kv_bytes_per_token: int) -> None:
        """A new worker, which is believed to be like the others until it has made steps of its own."""
        if self._assumed is None or self._prior is None:
            self._assumed = self._prior = assumed_coefficients(kv_bytes_per_token)
        self._fits[name] = StepFit()
        self.coefficients[name] = self._prior

    def drop_worker(self, name: str) -> None:
        """Forget a worker; what the fleet learned from it stays. Unknown: no-op."""
        self._fits.pop(name, None)
        self.coefficients.pop(name, None)

    def add(self, name: str, step: StepTimes) -> None:
        """Learn from a step of this worker. A step of no duration (virtual time) says nothing."""
        if step.duration_s <= 0:
            return
        assert self._assumed is not None and self._prior is not None, f"no worker {name!r}"
        fit = self._fits[name]
        if not fit.wants(step):
            return
        terms = terms_of(step)
        fit.add(step, terms)
        self._together.add(step, terms)
        if _is_turn(self._together.num_samples, PASS_ON_EVERY):
            prior = self._prior = _kept_off_zero(self._together.solve(self._assumed), self._assumed)
            self.coefficients = {other: each.solve(prior) for other, each in self._fits.items()}
        elif fit.num_samples <= REFIT_EVERY or fit.num_samples % REFIT_EVERY == 0:
            self.coefficients[name] = fit.solve(self._prior)


def terms_of(step: StepTimes) -> list[float]:
    """What a step adds to the normal equations."""
    assert step.duration_s > 0, step.duration_s
    work = (1, step.prefill_tokens, step.prefill_context, step.decode_requests, step.decode_kv_tokens)
    sample = [amount / (step.duration_s * 1e3) for amount in work]
    return [sample[i] * sample[j] for i, j in _UPPER] + sample


_SIZE = len(Coefficients.__struct_fields__)
_UPPER = [(i, j) for i in range(_SIZE) for j in range(i, _SIZE)]  # of a symmetric matrix, row by row
_SQUARE = [
    [_UPPER.index((min(i, j), max(i, j))) for j in range(_SIZE)] for i in range(_SIZE)
]  # places in _UPPER


class _NormalEquations:
    """Σ x·xᵀ and Σ x over samples x = work / duration, the older ones weighing less and less.

    In one flat list, the matrix's upper triangle first: samples come all the time, and take the event loop's.
    """

    def __init__(self) -> None:
        self.sums = [0.0] * (len(_UPPER) + _SIZE)

    def add(self, terms: list[float]) -> None:
        self.sums = [FORGETTING * old + term for old, term in zip(self.sums, terms, strict=True)]


def _kept_off_zero(learned: Coefficients, assumed: Coefficients) -> Coefficients:
    """What can be a prior: one of zero would be certain."""
    pairs = zip(msgspec.structs.astuple(learned), msgspec.structs.astuple(assumed), strict=True)
    return Coefficients(*(max(value, 1e-3 * floor) for value, floor in pairs))


def _is_turn(count: int, every: int) -> bool:
    """At 1, 2, 4, 8, … and from `every` on at each multiple of it."""
    return count % every == 0 if count >= every else count & (count - 1) == 0


def _solve_nonnegative(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Least squares under x ≥ 0: solve, set the most negative unknown to zero for good, until none is negative."""
    scale = [
        row[index] ** -0.5 for index, row in enumerate(matrix)
    ]  # unit diagonal: magnitudes differ by 1e9
    unknowns = list(range(len(vector)))
    while True:
        scaled = [[matrix[i][j] * scale[i] * scale[j] for j in unknowns] for i in unknowns]
        solution = _solve(scaled, [vector[i] * scale[i] for i in unknowns])
        worst = min(range(len(unknowns)), key=solution.__getitem__)
        if solution[worst] >= 0:
            break
        del unknowns[worst]
        if not unknowns:
            break
    result = [0.0] * len(vector)
    for index, value in zip(unknowns, solution, strict=False):
        result[index] = value * scale[index]
    return result


def _solve(matrix: list[list[float]], vector: list[float]) -> list[float]:
    """Gaussian elimination of a symmetric positive definite system of unit diagonal, which needs no pivoting.

    An unknown that only rounding tells apart from those before it is zero.
    """
    size = len(vector)
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    for pivot in range(size):
        if rows[pivot][pivot] < ROUNDING:
            continue
        for below in range(pivot + 1, size):
            factor = rows[below][pivot] / rows[pivot][pivot]
            if factor:
                rows[below] = [a - factor * b for a, b in zip(rows[below], rows[pivot], strict=True)]
    solution = [0.0] * size
    for index in reversed(range(size)):
        if rows[index][index] < ROUNDING:
            continue
        known = sum(rows[index][j] * solution[j] for j in range(index + 1, size))
        solution[index] = (rows[index][size] - known) / rows[index][index]
    return solution
