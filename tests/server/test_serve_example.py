"""examples/serve_client.py runs as it stands, without a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "serve_client.py"


def test_the_client_runs_against_a_server_of_its_own():
    """A stream, a response that goes on, and two receipts."""
    run = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), "--scripted"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert 0 == run.returncode, run.stderr
    for part in ("A cache keeps what was computed.", "tokens", "Yes.", "tool_start applied", "tool_end applied"):
        assert part in run.stdout, run.stdout
