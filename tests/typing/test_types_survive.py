"""Types survive decoration: mypy agrees with every line of the snippets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "snippet", sorted((Path(__file__).parent / "snippets").glob("*.py")), ids=lambda path: path.stem
)
def test_mypy_agrees_with_a_snippet(snippet: Path) -> None:
    """Each assertion holds, and each ignored error is one (unused ignores are errors under strict)."""
    argv = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(snippet)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert (0, "Success: no issues found in 1 source file\n") == (done.returncode, done.stdout)
