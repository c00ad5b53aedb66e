"""What is installed: the packages under `dynrt`, all of them, and nothing else, from a folder of any name."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("runtime", "engines", "planner", "transfer")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())


def package_files() -> set[str]:
    """Every file that must be installed, relative to the repository."""
    return {
        path.relative_to(REPOSITORY).as_posix()
        for package in PACKAGES
        for path in (REPOSITORY / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }


def test_every_folder_with_code_is_a_listed_package() -> None:
    folders = {Path(file).parent.as_posix().replace("/", ".") for file in package_files()}
    assert {f"dynrt.{folder}" for folder in folders} == set(PROJECT["tool"]["setuptools"]["packages"])


def test_torch_that_the_set_up_pins_is_one_that_the_project_accepts() -> None:
    pinned = re.search(
        r"^torch_cpu_version=(.+)$", (REPOSITORY / "bin" / "setup.sh").read_text(), re.MULTILINE
    )
    assert pinned is not None
    requirements = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    [torch] = [requirement for requirement in requirements if requirement.name == "torch"]
    assert torch.specifier.contains(pinned.group(1))


@pytest.mark.slow
def test_wheel_from_a_folder_of_another_name_holds_dynrt_and_nothing_else(tmp_path: Path) -> None:
    copy = tmp_path / "runtime of another name"
    skipped = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    shutil.copytree(REPOSITORY, copy, ignore=skipped)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(copy)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    [wheel] = tmp_path.glob("*.whl")
    version = PROJECT["project"]["version"]
    installed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert installed == {f"dynrt/{file}" for file in package_files()}
    assert f"dynrt-{version}.dist-info/licenses/LICENSE" in zipfile.ZipFile(wheel).namelist()
