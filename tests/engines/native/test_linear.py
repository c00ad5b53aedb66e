"""Products with a fixed weight: torch's own numbers, and memory that does not grow with every batch size."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
import torch.nn.functional as F  # noqa: N812

from dynrt.engines.native.linear import Linear

GROWTH_LIMIT_BYTES = 60_000_000  # 90 row counts of four weights take 18 MB, 221 MB if every kernel is kept
MANY_ROW_COUNTS = """
import os
import torch
from dynrt.engines.native.linear import Linear, bound_kernel_caches

def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")

bound_kernel_caches()
shapes = [(192, 128), (128, 64), (768, 128), (128, 384)]
products = [(Linear(torch.randn(shape)), torch.randn(512, shape[1])) for shape in shapes]

def step(rows):
    with torch.inference_mode():
        for linear, x in products:
            linear(x[:rows])

step(512)
before = resident_bytes()
for rows in range(1, 451, 5):
    step(rows)
print(resident_bytes() - before)
"""


def test_product_is_that_of_torch() -> None:
    weight, bias, x = torch.randn(24, 16), torch.randn(24), torch.randn(5, 16)
    torch.testing.assert_close(Linear(weight, bias)(x), F.linear(x, weight, bias))
    torch.testing.assert_close(Linear(weight)(x), F.linear(x, weight))


def test_memory_does_not_grow_with_every_row_count() -> None:
    """In a process of its own: the caches are the process's, and it reads their bounds once."""
    environment = {name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name}
    ran = subprocess.run(
        [sys.executable, "-c", MANY_ROW_COUNTS],
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < GROWTH_LIMIT_BYTES
