"""The page on LangGraph and its numbered examples run as they stand, without a model and without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("01_attach.py", ("All tests pass.", "Bill of ci-7", "run_tests (pytest)")),
        ("02_node.py", ("plan -.-> write;", "author: ", "check: ")),
        ("03_human_in_the_loop.py", ("May I deploy to production?", "deploy paused", "It is deployed.")),
        ("07_sub_agents.py", ("talk [thread=the expert]", "lead [main]", "6 calls on one bill")),
    ],
)
def test_a_numbered_example_runs(name, words) -> None:
    """In a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-W", "error", str(ROOT / "examples" / name), "--scripted"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    for word in words:
        assert word in done.stdout


def test_every_block_of_the_page_runs(tmp_path, monkeypatch) -> None:
    """Block after block in one namespace; no weights are needed for this page."""
    monkeypatch.chdir(tmp_path)
    for example in (
        Sybil(parsers=[PythonCodeBlockParser()], pattern="*.md", path=str(ROOT))
        .parse(ROOT / "docs" / "langgraph.md")
        .examples()
    ):
        example.evaluate()
