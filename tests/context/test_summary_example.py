"""examples/rolling_summary.py runs, with a model and without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "rolling_summary.py"


@pytest.mark.parametrize("argv", [(), ("--extract",)])
def test_the_example_folds_five_times(argv):
    """And the last prompt is a fraction of the conversation."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *argv], env=env, capture_output=True, text=True, timeout=200, check=True
    )
    lines = done.stdout.splitlines()
    assert 5 == sum("tokens are above the mark of 2,000; folding" in line for line in lines)
    assert "[Summary of earlier turns]" in lines
