"""bin/dynrt, bin/test and bin/bench: they set themselves up once, repair a set-up cut short, and pass on exit codes."""

from __future__ import annotations

import os
import select
import signal
from pathlib import Path

import pytest
from setup_sandbox import DEADLINE_S, FAKE_TOOL, SetupSandbox, wait_for_end, write_program

no_gpu = pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has an NVIDIA GPU")


@pytest.fixture
def sandbox(tmp_path: Path) -> SetupSandbox:
    return SetupSandbox(tmp_path)


def add_gpu(sandbox: SetupSandbox) -> None:
    write_program(sandbox.programs / "nvidia-smi", FAKE_TOOL)


def project(sandbox: SetupSandbox, extras: str = "") -> str:
    return f"pip --progress-bar off --editable {sandbox.clone}{extras}"


# --- the first start and the next ones ------------------------------------------------------------


@no_gpu
def test_first_start_sets_up_and_passes_its_arguments_on(sandbox: SetupSandbox) -> None:
    ended = sandbox.run("serve", "--host", "a b", "")
    assert (ended.status, ended.stdout) == (0, "dynrt\nserve\n--host\na b\n\n")
    assert sandbox.calls() == ["venv", "pip --progress-bar off torch==2.13.0+cpu", project(sandbox), "dynrt"]
    for stage in (
        "creating the environment",
        "installing torch 2.13.0",
        "installing dependencies",
        "set up in",
    ):
        assert stage in ended.stderr


def test_second_start_takes_no_set_up(sandbox: SetupSandbox) -> None:
    sandbox.run()
    sandbox.forget_calls()
    ended = sandbox.run("--version")
    assert (ended.status, ended.stdout, ended.stderr) == (0, "dynrt\n--version\n", "")
    assert sandbox.calls() == ["dynrt"]


def test_start_through_links_from_another_folder(sandbox: SetupSandbox, tmp_path: Path) -> None:
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    (elsewhere / "near").symlink_to(os.path.relpath(sandbox.clone / "bin" / "dynrt", elsewhere))
    (elsewhere / "far").symlink_to("near")
    ended = sandbox.run("serve", script=elsewhere / "far", cwd=elsewhere)
    assert (ended.status, ended.stdout) == (0, "dynrt\nserve\n")
    assert (sandbox.clone / ".venv" / ".setup").exists()
    assert sorted(path.name for path in elsewhere.iterdir()) == ["far", "near"]


def test_exit_code_of_dynrt_is_passed_on(sandbox: SetupSandbox) -> None:
    sandbox.switch("dynrt_fails")
    assert sandbox.run().status == 7


def test_changed_requirements_are_installed_into_the_same_environment(sandbox: SetupSandbox) -> None:
    sandbox.run()
    sandbox.forget_calls()
    with (sandbox.clone / "pyproject.toml").open("a") as pyproject:
        pyproject.write("# changed\n")
    assert sandbox.run().status == 0
    assert sandbox.calls() == [project(sandbox), "dynrt"]


def test_moved_clone_is_set_up_anew(sandbox: SetupSandbox) -> None:
    sandbox.run()
    sandbox.forget_calls()
    sandbox.clone = sandbox.clone.rename(sandbox.folder / "moved")
    assert sandbox.run().status == 0
    assert sandbox.calls()[0] == "venv"


# --- what can go wrong ----------------------------------------------------------------------------


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_interrupted_set_up_is_done_anew_and_leaves_no_process(
    sandbox: SetupSandbox, how: signal.Signals
) -> None:
    with sandbox.paused_in("pip") as process:
        os.killpg(process.pid, how)
        assert wait_for_end(process).status != 0  # returns once every process that holds its pipes has ended
    assert sum(call.startswith("pip") for call in sandbox.calls()) == 1
    sandbox.forget_calls()
    assert sandbox.run().status == 0
    assert sandbox.calls()[0] == "venv"


def test_update_cut_short_leads_to_a_new_environment(sandbox: SetupSandbox) -> None:
    sandbox.run()
    (sandbox.clone / "pyproject.toml").write_text("")
    with sandbox.paused_in("pip") as process:
        os.killpg(process.pid, signal.SIGKILL)
        wait_for_end(process)
    sandbox.forget_calls()
    assert sandbox.run().status == 0
    assert sandbox.calls()[0] == "venv"


def test_two_starts_at_once_set_up_once(sandbox: SetupSandbox) -> None:
    with sandbox.paused_in("pip") as first:
        second = sandbox.start("second")
        assert second.stderr is not None
        assert "another start is setting up" in second.stderr.readline()
    assert wait_for_end(first).status == 0
    assert wait_for_end(second).stdout == "dynrt\nsecond\n"
    assert sandbox.calls().count("venv") == 1
    assert sandbox.calls().count(project(sandbox)) == 1


def test_running_dynrt_does_not_hold_the_set_up_lock(sandbox: SetupSandbox) -> None:
    with sandbox.paused_in("dynrt") as running:
        (sandbox.clone / "pyproject.toml").write_text("")
        ended = sandbox.run()
    assert ended.status == 0
    assert "another start" not in ended.stderr
    assert wait_for_end(running).status == 0


def test_failure_of_pip_is_shown_and_not_taken_for_a_set_up(sandbox: SetupSandbox) -> None:
    sandbox.run()
    (sandbox.clone / "pyproject.toml").write_text("")
    sandbox.switch("pip_fails")
    ended = sandbox.run()
    assert ended.status == 1
    assert "ERROR: the network is down" in ended.stderr
    assert "start again" in ended.stderr
    (sandbox.folder / "pip_fails").unlink()
    sandbox.forget_calls()
    assert sandbox.run().status == 0
    assert sandbox.calls() == [
        project(sandbox),
        "dynrt",
    ]  # pip failed in good order: the environment was kept


def test_missing_python_is_named_with_the_way_out(sandbox: SetupSandbox) -> None:
    sandbox.switch("python_is_old")
    ended = sandbox.run()
    assert ended.status == 1
    assert "needs Python 3.11 or newer" in ended.stderr
    assert "python3-venv" in ended.stderr


# --- which torch ----------------------------------------------------------------------------------


@no_gpu
def test_without_a_cpu_build_at_hand_pytorchs_index_is_asked(sandbox: SetupSandbox) -> None:
    sandbox.switch("no_cpu_build")
    assert sandbox.run().status == 0
    assert "torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu" in sandbox.calls()[2]


def test_with_a_gpu_torch_comes_as_the_project_requires_it(sandbox: SetupSandbox) -> None:
    add_gpu(sandbox)
    ended = sandbox.run()
    assert sandbox.calls() == ["venv", project(sandbox), "dynrt"]
    assert "CUDA build" in ended.stderr


@no_gpu
def test_new_gpu_leads_to_a_new_environment(sandbox: SetupSandbox) -> None:
    sandbox.run()
    add_gpu(sandbox)
    sandbox.forget_calls()
    sandbox.run()
    assert sandbox.calls() == ["venv", project(sandbox), "dynrt"]


def test_on_a_terminal_pip_shows_its_own_progress(sandbox: SetupSandbox) -> None:
    ours, theirs = os.openpty()
    process = sandbox.start(stderr=theirs)
    os.close(theirs)
    process.communicate(timeout=DEADLINE_S)
    os.close(ours)
    assert f"pip --editable {sandbox.clone}" in sandbox.calls()


# --- bin/test and bin/bench -----------------------------------------------------------------------


def run_tests(sandbox: SetupSandbox, *arguments: str) -> tuple[int, list[str], str]:
    ended = sandbox.run(*arguments, script=sandbox.clone / "bin" / "test")
    return ended.status, ended.stdout.splitlines(), ended.stderr


def test_test_runs_all_stages_and_its_environment_serves_dynrt_too(sandbox: SetupSandbox) -> None:
    status, printed, said = run_tests(sandbox)
    assert status == 0
    assert project(sandbox, "[test]") in sandbox.calls()
    tools = [call for call in sandbox.calls() if call in ("ruff", "mypy", "pytest")]
    assert tools == ["ruff", "ruff", "mypy", "pytest", "pytest"]
    assert printed[-3:] == ["pytest", "--version", "pytest"]  # the first one in the environment with vLLM
    assert said.count("passed in") == 5
    sandbox.forget_calls()
    assert sandbox.run().status == 0
    assert sandbox.calls() == ["dynrt"]


def test_continuous_integration_runs_all_stages_and_gets_their_exit_code(sandbox: SetupSandbox) -> None:
    sandbox.switch("pytest_fails")
    ended = sandbox.run(script=sandbox.clone / ".ci" / "run")
    assert ended.status == 7
    assert [call for call in sandbox.calls() if call in ("ruff", "mypy")] == ["ruff", "ruff", "mypy"]
    assert sandbox.calls()[-1] == "pytest"


def test_environment_of_dynrt_gets_the_test_packages_added(sandbox: SetupSandbox) -> None:
    sandbox.run()
    sandbox.forget_calls()
    run_tests(sandbox)
    assert sandbox.calls()[0] == project(sandbox, "[test]")


def test_test_fast_leaves_out_the_slow_ones(sandbox: SetupSandbox) -> None:
    status, printed, _ = run_tests(sandbox, "fast", "--durations=3")
    assert status == 0
    assert printed[-4:] == ["pytest", "-m", "not slow and not e2e", "--durations=3"]


def test_test_passes_other_arguments_to_pytest_alone(sandbox: SetupSandbox) -> None:
    status, printed, _ = run_tests(sandbox, "tests/some file.py", "-x")
    assert status == 0
    assert printed == ["pytest", "tests/some file.py", "-x"]


@pytest.mark.parametrize(("tool", "reached"), [("ruff", ["ruff"]), ("mypy", ["ruff", "ruff", "mypy"])])
def test_first_failing_stage_gives_the_exit_code(
    sandbox: SetupSandbox, tool: str, reached: list[str]
) -> None:
    run_tests(sandbox)
    sandbox.forget_calls()
    sandbox.switch(f"{tool}_fails")
    status, _, said = run_tests(sandbox)
    assert status == 7
    assert sandbox.calls() == reached
    assert "failed with exit code 7" in said


@pytest.mark.slow
def test_process_that_outlives_the_tests_fails_them_and_is_ended(sandbox: SetupSandbox) -> None:
    sandbox.switch("pytest_leaves_a_process")
    status, _, said = run_tests(sandbox, "tests")
    assert status == 1
    assert "left these processes behind" in said
    [left_behind] = [line.split()[0] for line in said.splitlines() if line.endswith("sleep 60")]
    assert has_ended(int(left_behind))


def has_ended(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    with os.fdopen(pidfd):
        return bool(select.select([pidfd], [], [], DEADLINE_S)[0])


def test_bench_lists_what_there_is_with_its_claim(sandbox: SetupSandbox) -> None:
    (sandbox.clone / "bench").mkdir()
    (sandbox.clone / "bench" / "handoff.py").write_text(
        '"""Exposed time stays under its bound.\n\nMore.\n"""\n'
    )
    (sandbox.clone / "bench" / "startup.py").write_text('"""The runtime starts in under a second."""\n')
    bench = sandbox.clone / "bin" / "bench"
    listed = sandbox.run(script=bench)
    assert [line.split(maxsplit=1) for line in listed.stdout.splitlines()] == [
        ["handoff", "Exposed time stays under its bound."],
        ["startup", "The runtime starts in under a second."],
    ]
    assert not sandbox.calls()
    unknown = sandbox.run("nothing", script=bench)
    assert unknown.status == 2
    assert "no benchmark named 'nothing'" in unknown.stderr
    assert (
        sandbox.run("startup", "--quick", script=bench).stdout
        == f"python {sandbox.clone}/bench/startup.py --quick\n"
    )
