"""examples/memory.py runs, and injects what it says."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "memory.py"


def test_the_example_injects_what_answers_and_nothing_else(tmp_path):
    """Twice with one file: nothing is stored twice."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, str(EXAMPLE), str(tmp_path / "m.sqlite")]
    for _ in range(2):
        done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=200, check=False)
        assert (0, "") == (done.returncode, done.stderr)
        port, flaky, haiku = done.stdout.split("\n  injected ")[1:]
        assert "6543" in port
        assert "clock that jumped" in flaky
        assert haiku.startswith("0 tokens")
