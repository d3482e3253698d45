"""The examples of tools, agents and other frameworks run, without a model."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "words", "package"),
    [
        (
            "04_tool_function.py",
            ("tool_update: run_tests running", "All tests pass.", "run_tests (pytest)"),
            "langgraph",
        ),
        ("05_tool_node.py", ("characters became", "Bill of build", "shell (make"), "langgraph"),
        ("06_create_agent.py", ("Sunny in Lisbon.", "Bill of trip", "weather"), "langchain"),
        ("08_plain_openai.py", ("There are two files.", "Bill of count-files", "shell (ls)"), "openai"),
        ("09_openai_agents.py", ("There are two files.", "Bill of count-files", "shell (ls)"), "agents"),
        ("10_pydantic_ai.py", ("There are two files.", "Bill of count-files", "shell (ls)"), "pydantic_ai"),
    ],
)
def test_an_example_runs_and_prints_its_bill(name, words, package) -> None:
    """As its docstring says; in at most sixty lines."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) <= 60
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, str(EXAMPLES / name), "--scripted"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    for word in words:
        assert word in done.stdout
