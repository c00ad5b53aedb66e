"""`dynrt replay` from its command line: table, JSON, policies, and what it refuses."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec
import pytest
from small_traces import write_profile

from dynrt.runtime.cli import main
from dynrt.runtime.replay.options import add_options
from dynrt.runtime.replay.policies import POLICIES
from dynrt.runtime.replay.replay import ReplayConfig

TRACE = "".join(
    f'{{"timestamp": {1000 * number}, "input_length": {600 + number}, "output_length": {outputs}, '
    f'"hash_ids": [0, {number + 1}]}}\n'
    for number, outputs in enumerate([5, 1, 40, 0, 9])
)
AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,9
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What it says of them."""
    assert main(["replay", *arguments]) == 2
    return capsys.readouterr().err


def test_options_have_the_defaults_of_a_replay() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    defaults, expected = vars(parser.parse_args(["a.jsonl"])), msgspec.structs.asdict(ReplayConfig())
    assert f"{defaults['model']}@{defaults['gpu']}" == expected.pop("profile")
    assert {name: defaults[name] for name in expected} == expected
    told = "".join(parser.format_help().split())  # without the breaks between its lines
    assert [name for name in (*POLICIES, "all") if name not in told] == []


def test_table_with_a_row_for_each_policy(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    assert main(["replay", trace, "--policy", "planner", "--policy", "random"]) == 0
    title, _, header, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith(
        "4 requests in 4 s on 4 prefill and 4 decode workers, llama-3.1-8b@h100, 833 blocks"
    )
    assert header.split()[:3] == ["policy", "hit", "%"]
    assert [row.split()[0] for row in rows] == ["planner", "random"]


def test_json_has_the_fleet_and_all_policies(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    assert main(["replay", trace, "--policy", "all", "--prefill", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["config"]["prefill"] == 2
    assert [one["policy"] for one in told["policies"]] == list(POLICIES)
    assert {one["requests"] for one in told["policies"]} == {4}, "one of the five has no answer"
    assert {one["failed"] for one in told["policies"]} == {0}


def test_azure_trace_by_a_profile_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    arguments = [str(path), "--profile", write_profile(tmp_path), "--block-size", "16", "--json"]
    assert main(["replay", *arguments]) == 0
    (one,) = json.loads(capsys.readouterr().out)["policies"]
    assert (one["requests"], one["failed"], one["hit_share"]) == (2, 0, 0.0)


def test_faster_and_fewer(capsys: pytest.CaptureFixture[str], trace: str) -> None:
    assert main(["replay", trace, "--requests", "3", "--rate", "2"]) == 0
    assert capsys.readouterr().out.startswith("3 requests in 1 s")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--prefill", "-1"], "--prefill is -1; at least 0"),
        (["--decode", "0"], "--decode is 0; at least 1"),
        (["--prefill", "65"], "--prefill is 65; it can be 0 to 64"),
        (["--blocks", "1"], "--blocks is 1; at least 2"),
        (["--blocks", "2", "--block-size", "64"], "11 blocks of 64; a worker has 2: raise --blocks"),
        (["--block-size", "0"], "--block-size is 0; at least 1"),
        (["--policy", "best"], "--policy is 'best'; give all or one of planner, round-robin"),
        (["--gpu", "t4"], "'llama-3.1-8b@t4'; give MODEL@GPU"),
        (["--rate", "0"], "--rate is 0; it must be above 0"),
        (["--ttft-limit", "-1"], "--ttft-limit is -1; it must be above 0"),
        (["--itl-limit", "nan"], "--itl-limit is nan; it must be above 0"),
        (["--requests", "0"], "--requests is 0; at least 1"),
        (["--max-batch-tokens", "0"], "--max-batch-tokens is 0; at least 1"),
    ],
)
def test_what_cannot_work_is_said(
    capsys: pytest.CaptureFixture[str], trace: str, arguments: list[str], complaint: str
) -> None:
    assert complaint in refused(capsys, trace, *arguments)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "cannot read the trace"),
        ("", "begins with b''"),
        ("time,tokens\n", "begins with b'time,tokens"),
        (TRACE + '{"timestamp": 0}', "line 6"),
        (
            '{"timestamp": 0, "input_length": 9, "output_length": 0, "hash_ids": [0]}',
            "no request that has an answer",
        ),
    ],
)
def test_a_bad_trace_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str | None, complaint: str
) -> None:
    path = tmp_path / "a.jsonl"
    if content is not None:
        path.write_text(content)
    told = refused(capsys, str(path))
    assert str(path) in told
    assert complaint in told


def test_plot_without_matplotlib_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: str
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'dynrt[plot]'" in refused(capsys, trace, "--plot", "a.png")
