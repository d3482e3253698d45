"""The simulator against the real engine at a known speed: real batches, tiers, policy and threads; a step is a sleep.

A machine that others use as well is never twice as fast as it was (docs/validation.md). Here each step of the embedded
engine lasts exactly what a formula says, tools are sleeps, and what is left is the model of who waits for whom.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import fmean

import pytest

from agentkv.sim.replay import compare
from agentkv.sim.steptimes import step_times

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from paced import BASE_S, LINEAR_S, SIZES, recorded


@pytest.mark.slow
def test_stalls_and_task_times_are_predicted_at_a_known_speed(start, tmp_path) -> None:
    """Short of memory, nearly enough, plenty, and so short that tasks are held back: the mean stall of all within 15 %,
    each mean task time within 8 %.

    A single stall depends on who comes a moment earlier, so it is held to half of its size only.
    """
    compared = {}
    for blocks, host in SIZES:
        engine = start(blocks=blocks, host=host)
        record = recorded(engine, tmp_path / f"{blocks}-{host}.jsonl")
        told = compared[blocks, host] = compare(record)
        print(
            f"\n{blocks} blocks, {host} on host: stalls {told.measured.stall_mean_s:.3f} measured, "
            f"{told.predicted.stall_mean_s:.3f} predicted; tasks {told.measured.task_mean_s:.2f} and "
            f"{told.predicted.task_mean_s:.2f}; {record.preemptions} sent back"
        )
        assert told.predicted.stall_mean_s == pytest.approx(told.measured.stall_mean_s, rel=0.5, abs=0.03)
        assert told.predicted.task_mean_s == pytest.approx(told.measured.task_mean_s, rel=0.08)
        base_s, _, linear_s, _ = step_times(record)  # at so short contexts the other two hardly show
        assert (base_s, linear_s) == pytest.approx((BASE_S, LINEAR_S), rel=0.3)
    both = [fmean(getattr(one, side).stall_mean_s for one in compared.values()) for side in ("predicted", "measured")]
    assert both[0] == pytest.approx(both[1], rel=0.15)
