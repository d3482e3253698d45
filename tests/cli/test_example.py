"""examples/when_to_move.py: from assumed rates, and from what was saved here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from agentkv.core.rates import Prefill, Rates
from agentkv.runtime.machine import Place, machine_digest
from agentkv.runtime.ratefiles import save_rates

EXAMPLE = Path(__file__).parents[2] / "examples" / "when_to_move.py"


def lines_of(*argv):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), *argv], env=env, capture_output=True, text=True, timeout=200, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)
    return done.stdout.splitlines()


def test_the_example_prints_the_crossover_of_an_assumed_machine():
    """No model, nothing measured: 9 lengths up to 128k tokens."""
    lines = lines_of("--scripted")
    assert "  131072" == lines[9][:8]
    assert "recompute loses to the host tier at every length" == lines[-2]


def test_the_example_uses_what_was_saved():
    """It loads no model then."""
    place = Place(
        machine=machine_digest(), cpu="c", cores=1, device="cpu", fingerprint="ab", model="smollm2-135m",
        token_bytes=23_040, context_tokens=1024,
    )  # fmt: skip
    prefill = Prefill(linear_s=1e-3)
    save_rates(place, Rates(memcpy_bytes_s=1e9, h2d_bytes_s=23_040_000, d2h_bytes_s=1e9, prefill=prefill))
    _, first, second, last = lines_of()
    assert ["512", "512", "ms", "512", "ms", "-", "recompute"] == first.split()
    assert ["1024", "1.0", "s", "1.0", "s", "-", "recompute"] == second.split()
    assert "recompute loses to the host tier at no length" == last
