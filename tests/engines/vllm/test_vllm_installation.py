"""A torchvision that does not fit torch is told before vLLM fails over it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dynrt.engines.vllm.installation import check_torchvision
from dynrt.runtime.errors import ConfigError


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that come before all others."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    return tmp_path


def install(site: Path, source: str) -> None:
    (site / "torchvision").mkdir()
    (site / "torchvision" / "__init__.py").write_text(source)
    metadata = site / "torchvision-0.28.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")


def test_one_of_another_build_is_refused_with_the_way_out(site: Path) -> None:
    install(site, "raise RuntimeError('operator torchvision::nms does not exist')")
    with pytest.raises(
        ConfigError, match=r"torchvision 0\.28\.0 does not fit torch .*nms does not exist.* pip uninstall"
    ):
        check_torchvision()


def test_one_that_fits_is_left_alone(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "")
    check_torchvision()
    monkeypatch.delitem(sys.modules, "torchvision")


def test_none_is_needed() -> None:
    check_torchvision()
