"""Trace formats, arrivals, and the prompts made up for them."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from dynrt.planner.traces import (
    VOCAB_SIZE,
    TraceRequest,
    block_token_ids,
    compress_arrivals,
    has_ticks,
    read_mooncake,
    read_trace,
    spread_arrivals,
)
from dynrt.runtime.messages import unpack_ids

TWO_LINES = """\
{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 1024, "output_length": 3, "hash_ids": [0, 1]}
"""


def write(directory: Path, text: str) -> Path:
    path = directory / "trace.jsonl"
    path.write_text(text)
    return path


def arriving(*arrivals_s: float) -> list[TraceRequest]:
    return [TraceRequest(number, at, 10, 1, [number]) for number, at in enumerate(arrivals_s)]


def test_lines_become_requests_in_seconds_and_full_blocks(tmp_path: Path) -> None:
    first, second = read_mooncake(write(tmp_path, TWO_LINES))
    assert (first.number, first.arrival_s, first.prompt_tokens, first.output_tokens) == (0, 0.0, 1100, 52)
    assert (first.full_blocks, first.usable_blocks) == ([0, 1], 2)
    assert (second.number, second.arrival_s) == (1, 3.0)


def test_the_last_token_of_a_prompt_of_whole_blocks_is_not_taken_from_a_cache(tmp_path: Path) -> None:
    _, second = read_mooncake(write(tmp_path, TWO_LINES))
    assert (second.full_blocks, second.usable_blocks) == ([0, 1], 1)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"timestamp": 0, "input_length": 513, "output_length": 1, "hash_ids": [0]}', "2 ids of 512"),
        ('{"timestamp": 0, "input_length": 0, "output_length": 1, "hash_ids": []}', "at least 1 token"),
        ('{"timestamp": 0, "input_length": 5}', "output_length"),
        ("no JSON", "line 3"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint) as error:
        read_mooncake(write(tmp_path, TWO_LINES + line))
    assert str(error.value).startswith("line 3: ")


def test_prompts_share_exactly_the_blocks_that_their_ids_share() -> None:
    one = TraceRequest(0, 0.0, 10, 1, [7, 8, 9], block_tokens=4).prompt_ids()
    other = TraceRequest(1, 0.0, 12, 1, [7, 8, 10], block_tokens=4).prompt_ids()
    assert (len(one), len(other)) == (10 * 4, 12 * 4)
    assert one[:32] == other[:32]
    assert one[32:] != other[32:40]


def test_token_ids_of_a_block_are_always_the_same() -> None:
    assert block_token_ids([3, 4], 16) == block_token_ids([3], 16) + block_token_ids([4], 16)


def test_arrivals_are_spread_over_their_tick_in_the_trace_s_order() -> None:
    spread = spread_arrivals(arriving(0.0, 0.0, 0.0, 3.0, 3.0), 3.0, Random(1))
    assert [request.number for request in spread] == [0, 1, 2, 3, 4]
    times = [request.arrival_s for request in spread]
    assert times == sorted(times) and len(set(times)) == 5
    assert all(0 <= time <= 3 for time in times[:3]) and all(3 <= time <= 6 for time in times[3:])


def test_compressed_arrivals_keep_their_order_and_proportions() -> None:
    assert [request.arrival_s for request in compress_arrivals(arriving(0.0, 1.0, 4.0), 2.0)] == [0, 0.5, 2]


AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,600,109
"""


def test_rows_of_azure_become_requests_that_share_nothing(tmp_path: Path) -> None:
    first, second = read_trace(write(tmp_path, AZURE))
    assert (first.number, first.arrival_s, first.prompt_tokens, first.output_tokens) == (0, 0.0, 374, 44)
    assert second.arrival_s == pytest.approx(4.314579)
    assert len(second.block_ids) == 2
    assert not set(first.block_ids) & set(second.block_ids)


def test_the_format_is_told_by_how_a_file_begins(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path, TWO_LINES))) == 2
    with pytest.raises(ValueError, match=r"begins with .*some text.*TIMESTAMP"):
        read_trace(write(tmp_path, "some text"))


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("2023-11-16 18:15:46.68,many,44", "line 4: .*many"),
        ("yesterday,374,44", "line 4: .*yesterday"),
        ("2023-11-16 18:15:46.68,374", "line 4: .*expected TIMESTAMP"),
        ("2023-11-16 18:15:46.68,0,44", "line 4: 0 prompt tokens"),
    ],
)
def test_a_broken_row_is_named(tmp_path: Path, row: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_trace(write(tmp_path, AZURE + row + "\n"))


def test_ticks_are_seen_where_most_arrivals_coincide() -> None:
    assert has_ticks(arriving(0.0, 0.0, 0.0, 3.0, 3.0))
    assert not has_ticks(arriving(0.0, 0.1, 0.1, 3.0))


def test_made_up_tokens_fit_the_vocabulary() -> None:
    assert max(unpack_ids(block_token_ids(range(20), 64))) < VOCAB_SIZE
