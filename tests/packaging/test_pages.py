"""What the pages of docs/ name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_exist(page: Path) -> None:
    named = set(re.findall(r"`(?:tests/)?([\w/]*test_\w+\.py)`", page.read_text()))
    assert {name for name in named if not any((REPOSITORY / "tests").rglob(name))} == set()
