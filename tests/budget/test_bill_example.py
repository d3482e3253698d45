"""examples/bill.py runs, prints a bill and writes a page."""

import os
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "bill.py"


def test_the_example_prints_a_bill_and_writes_the_page(tmp_path):
    """Minutes of waiting pass in no time."""
    page = tmp_path / "bill.html"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(page)], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert "meets the wall of long chain first" in " ".join(done.stdout.split())
    assert "<svg" in page.read_text(encoding="utf-8")
