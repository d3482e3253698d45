"""Every Python block in README.md and docs/ runs, block after block in one namespace per page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.weights
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_on_this_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What a newcomer copies works as it stands."""
    monkeypatch.chdir(tmp_path)
    document = Sybil(parsers=[PythonCodeBlockParser()], pattern="*.md", path=str(ROOT)).parse(page)
    for example in document.examples():
        example.evaluate()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_placeholder_is_left_on_this_page(page: Path):
    """A page that was filled in by hand is filled in everywhere."""
    assert [] == re.findall(r"^[A-Z]+_[A-Z]+$|TODO|FIXME", page.read_text(encoding="utf-8"), re.MULTILINE)
