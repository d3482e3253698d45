"""The simulator against reality: recorded runs, each replayed with constants fitted to its own steps.

Without options the runs are the embedded engine's at a known speed (`paced.py`): eight in two minutes, which gives the same on
a machine that others use as well. With `--seeds 0,0,1,2` they are runs of `agentkv demo --record` with the real model,
two or three minutes each, of which one is luck and only the mean over several says something.

Figures: `stall_error`, `task_time_error`: |predicted - measured| / measured of the means over all runs, the prediction
being the mean of 20 replays of each run on a machine as uneven as the recorded one. Beside them: the same for a machine
of constant speed, with the constants of the run before, in the plain simulator of the policy matrix, and how far two runs with the same seed
were from each other (A/A). What is fitted and what is not: docs/validation.md.

    python benchmarks/validate.py [--rounds 2] [--seeds 0,0,1,2] [--records a.jsonl,b.jsonl] [--keep FOLDER] [--json]
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import paced
from common import arguments, emit, say

from agentkv.sim import record as records
from agentkv.sim.costs import Costs
from agentkv.sim.device import Call
from agentkv.sim.record import Record
from agentkv.sim.replay import Side, drawn, relative_error, rules_of, workload_of
from agentkv.sim.simulator import Simulator, Task
from agentkv.sim.steptimes import calibrated, machine_pace, unevenness
from agentkv.sim.stepwise import Pace, steady

RUN_LIMIT_S = 900.0


def main() -> None:
    args = arguments(
        "Replay recorded runs of the demo in the simulator.",
        rounds=(int, 2, "runs at each size of memory, at a known speed"),
        seeds=(str, "", "instead of these a run of the demo for each seed; the first two of a kind are the A/A"),
        records=(str, "", "records that are there already, instead of runs"),
        keep=(str, "", "a folder in which to leave the records"),
        tasks=(int, 4, "tasks of each run"),
        turns=(int, 6, "tool calls of each task"),
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(args.keep or scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if args.records:
            told = [(Path(one).stem, records.read(Path(one))) for one in args.records.split(",")]
        elif args.seeds:
            seeds = args.seeds.split(",")
            found = [(f"seed {s}", record(folder / f"{i}-seed{s}.jsonl", s, args)) for i, s in enumerate(seeds)]
            told = [(name, records.read(path)) for name, path in found]
        else:
            told = at_known_speed(folder, args.rounds)
        emit(args, figures(told, args))


def at_known_speed(folder: Path, rounds: int) -> list[tuple[str, Record]]:
    """Runs of the real engine whose steps are sleeps, at each size of memory."""
    make = paced.tiny_engines(folder / "tiny")
    told = []
    for number in range(rounds):
        for blocks, host in paced.SIZES:
            path = folder / f"{blocks}-{host}-{number}.jsonl"
            told.append((f"{blocks}+{host} blocks", paced.recorded(make(blocks, host), path, seed=number)))
    return told


def record(path: Path, seed: str, args: Any) -> Path:
    """One run of the demo, in a process of its own."""
    began_s = time.monotonic()
    command = [sys.executable, "-m", "agentkv.cli", "demo", "--record", str(path), "--seed", seed]
    command += ["--tasks", str(args.tasks), "--turns", str(args.turns)]
    load = os.getloadavg()[0]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=RUN_LIMIT_S)
    say(args, f"recorded seed {seed} in {time.monotonic() - began_s:.0f} s; load before {load:.1f}")
    return path


def figures(told: list[tuple[str, Record]], args: Any) -> dict[str, Any]:
    """Errors of the means over all runs, and one line for each run."""
    rows: list[dict[str, Any]] = []
    before: Costs | None = None
    for name, one in told:
        costs = calibrated(one)
        pace = machine_pace(one, costs)
        rows.append(
            {
                "run": name,
                **sides("measured", [Side(stalls_s=one.stalls_s, tasks_s=one.tasks_s)]),
                **predicted("predicted", one, costs, pace),
                **predicted("constant_speed", one, costs, steady),
                **sides("plain", [plain(one, costs)]),
                **({} if before is None else predicted("constants_of_last", one, before, steady)),
                "unevenness": round(unevenness(one, costs, pace=pace), 3),
                "step_ms": round(1e3 * costs.decode_s(4000), 1),
                "prefill_ms_512": round(1e3 * costs.prefill.extend_s(2000, 2512), 0),
                "preemptions": one.preemptions,
            }
        )
        before = costs
        say(args, str(rows[-1]))
    return {
        "stall_error": error(rows, "predicted", "stall_s"),
        "task_time_error": error(rows, "predicted", "task_s"),
        "stall_error_constant_speed": error(rows, "constant_speed", "stall_s"),
        "task_time_error_constant_speed": error(rows, "constant_speed", "task_s"),
        "stall_error_plain": error(rows, "plain", "stall_s"),
        "task_time_error_plain": error(rows, "plain", "task_s"),
        "stall_error_constants_of_last": error(rows[1:], "constants_of_last", "stall_s"),
        "task_time_error_constants_of_last": error(rows[1:], "constants_of_last", "task_s"),
        "stall_a_over_a": a_over_a(rows, "stall_s"),
        "task_time_a_over_a": a_over_a(rows, "task_s"),
        "runs": rows,
    }


def predicted(side: str, one: Record, costs: Costs, pace: Pace) -> dict[str, float]:
    """Means over the draws, and how far the draws are apart."""
    told = drawn(one, costs, pace=pace)
    spread = statistics.stdev(each.stall_mean_s for each in told)
    return {**sides(side, told), f"{side}_stall_sd_s": round(spread, 3)}


class Plain(Simulator):
    """The simulator that makes the policy matrix, with each turn's stall."""

    def run_through(self) -> tuple[dict[str, list[float]], dict[str, float]]:
        """Each session's stalls, and its end."""
        self.stalls_s: dict[str, list[float]] = {}
        self.ended_s: dict[str, float] = {}
        self.run()
        return self.stalls_s, self.ended_s

    def _call_ended(self, call: Call) -> None:
        task = call.owner
        assert isinstance(task, Task)
        assert call.first_step_s is not None
        again_s = task.lost_s if task.index else 0.0
        self.stalls_s.setdefault(task.context.name, []).append(call.first_step_s - task.arrived_s + again_s)
        self.ended_s[task.context.name] = self.now_s()
        super()._call_ended(call)


def plain(one: Record, costs: Costs) -> Side:
    """One replay in the plain simulator, at constant speed."""
    load = workload_of(one)
    simulator = Plain(load, costs, rules_of(one), shared_tokens=one.sizes.shared_tokens)
    stalls_s, ended_s = simulator.run_through()
    after_tool = ((calls[0].session, i + 1) for calls in one.sessions for i, call in enumerate(calls[:-1]) if call.tool)
    return Side(
        stalls_s=tuple(stalls_s[name][i] for name, i in after_tool),
        tasks_s=tuple(ended_s[each.name] - at_s for each, at_s in zip(load.sessions, load.arrivals_s, strict=True)),
    )


def sides(name: str, told: list[Side]) -> dict[str, float]:
    return {
        f"{name}_stall_s": round(statistics.fmean(one.stall_mean_s for one in told), 4),
        f"{name}_task_s": round(statistics.fmean(one.task_mean_s for one in told), 3),
    }


def error(rows: list[dict[str, Any]], side: str, what: str) -> float | None:
    """The relative error of the mean over the runs; None without any."""
    if not rows:
        return None
    means = [statistics.fmean(row[f"{name}_{what}"] for row in rows) for name in (side, "measured")]
    return round(relative_error(*means), 4)


def a_over_a(rows: list[dict[str, Any]], what: str) -> float | None:
    """|a - b| / mean of the first two runs of one name; None if there are no two."""
    by_name: dict[str, list[float]] = {}
    for row in rows:
        by_name.setdefault(row["run"], []).append(row[f"measured_{what}"])
    pairs = [values[:2] for values in by_name.values() if len(values) > 1]
    return round(abs(pairs[0][0] - pairs[0][1]) / statistics.fmean(pairs[0]), 4) if pairs else None


if __name__ == "__main__":
    main()
