"""What cannot work is refused before anything is started, by the name of its option."""

from __future__ import annotations

from typing import Any

import pytest

from dynrt.runtime.config import RuntimeConfig, check_config
from dynrt.runtime.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefill": -1}, r"--prefill is -1; it can be 0 to 64"),
        ({"decode": 65}, r"--decode is 65; it can be 0 to 64"),
        ({"prefill": 0, "decode": 0}, r"leaves no engine; use at least --decode 1, or --control"),
        ({"prefill": 2, "decode": 0}, r"--prefill 2 --decode 0 leaves nobody to decode"),
        ({"threads": 0}, r"--threads is 0; at least 1"),
        ({"kv_blocks": 1}, r"--kv-blocks is 1; at least 2"),
        ({"max_batch_tokens": 0}, r"--max-batch-tokens is 0; at least 1"),
        ({"max_batch_requests": -3}, r"--max-batch-requests is -3; at least 1"),
        ({"max_waiting_requests": 0}, r"--max-waiting-requests is 0; at least 1"),
        ({"max_ttft_s": 0.0}, r"--max-ttft is 0; it must be more than 0 seconds"),
        ({"max_ttft_s": float("nan")}, r"--max-ttft is nan; it must be more than 0 seconds"),
        ({"index_memory_bytes": 999_999}, r"--index-memory is 0.999999 MB; at least 1"),
    ],
)
def test_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(RuntimeConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prefill": 0},
        {"prefill": 64, "decode": 64},
        {"threads": 1, "kv_blocks": 2, "max_waiting_requests": 1, "max_ttft_s": 0.1},
        {"prefill": 0, "decode": 0, "control": "tcp://127.0.0.1:*"},
        {"prefill": 1, "decode": 0, "control": "ipc:///tmp/x"},
    ],
)
def test_accepted(settings: dict[str, Any]) -> None:
    check_config(RuntimeConfig(**settings))
