"""The soak in small: `benchmarks/soak.py` runs it at length."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import agentkv

SOAK = Path(agentkv.__file__).parents[1] / "benchmarks" / "soak.py"


def test_sessions_that_come_and_go_lose_and_leak_nothing(tmp_path):
    """Real threads, three tiers, shared beginnings: every block is what was written, every slot comes back, and no
    file stays.
    """
    command = [sys.executable, str(SOAK), "--json", "--cycles", "600", "--disk", str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert 0 == run.returncode, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert 600 == result["cycles"]
    assert [0, 0, 0] == [result[key] for key in ("mismatches", "slots_leaked", "duplicate_loads")]
    assert result["blocks_from_host"] > 0
    assert result["blocks_from_disk"] > 0
    assert [] == list(tmp_path.iterdir())
