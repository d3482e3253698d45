"""Policies in the simulator: `lazy` against every baseline, with the bounds beside it, over a matrix of machines and loads.

Without options a subset with a configuration of each kind, on a made-up trace; `--full` for all, `--trace F` for a
recorded one, `--only 16` for the configurations whose name contains that, `--rows` for the tables of docs/policies.md.
`--keep FILE` writes each configuration there when it is done, and what is there is not run again: the whole matrix takes
hours on one core. It says nothing of a policy that has changed since: leave its lines out, or take another file.
"""

from __future__ import annotations

import json
import math
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from common import arguments, emit, say

from agentkv.policy import BASELINES, BOUNDS, OURS
from agentkv.sim.compare import INFINITE, compare
from agentkv.sim.costs import costs_for
from agentkv.sim.synthetic import synthetic
from agentkv.sim.trace import load
from agentkv.sim.workload import workload
from agentkv.units import GIB

MACHINES = {
    "8b-h100": {"model": "llama-3.1-8b", "gpu": "h100-80"},
    "70b-2h200": {"model": "llama-3.1-70b", "gpu": "h200", "gpus": 2},
    "8b-24gb": {"model": "llama-3.1-8b", "gpu": "rtx4090-12gbs"},
}
TIERS = {"64": (64, 0), "256": (256, 0), "64+disk": (64, 2000)}
WINDOW = {"8b-24gb": 24_576}
"""A 24 GB card has room for 30,000 tokens beside the 8B weights: longer contexts are shrunk to this."""
RIVALS = tuple(name for name in (*OURS, *BASELINES) if name not in ("lazy", "keep"))
"""What `lazy` is held against; `keep` is `lazy` itself without writing ahead."""
FULL = 0.99
"""LRU finds less than this of what it could: the tiers below the device are full."""
NO_STALL_S = 0.02
"""Where LRU's P95 stall is below this nobody is kept waiting, and a ratio says nothing."""


NAMES = (
    "task_mean_s",
    "task_p95_s",
    "stall_p50_s",
    "stall_p95_s",
    "moved_bytes",
    "device_idle",
    "useful",
    "hit_share",
)
Cell = dict[str, dict[str, float]]
"""Figures by policy of one configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One cell of the matrix."""

    machine: str
    agents: int
    humans: bool
    open_loop: bool
    tiers: str

    @property
    def name(self) -> str:
        people = "people" if self.humans else "tools"
        loop = "open" if self.open_loop else "closed"
        return f"{self.machine}/{self.tiers}/{self.agents}/{people}/{loop}"


SUBSET = (
    Config(machine="8b-24gb", agents=16, humans=False, open_loop=False, tiers="64"),
    Config(machine="8b-24gb", agents=16, humans=True, open_loop=False, tiers="64"),
    Config(machine="8b-h100", agents=16, humans=False, open_loop=False, tiers="64"),
    Config(machine="8b-h100", agents=16, humans=True, open_loop=False, tiers="64"),
    Config(machine="8b-h100", agents=24, humans=False, open_loop=True, tiers="64"),
    Config(machine="70b-2h200", agents=16, humans=True, open_loop=True, tiers="256"),
    Config(machine="8b-h100", agents=24, humans=True, open_loop=False, tiers="64+disk"),
)
"""At least one of each case: slow link, full host, open loop, disk."""


def matrix() -> list[Config]:
    """Machines x agents x people x loop x tiers."""
    return [
        Config(machine=machine, agents=agents, humans=humans, open_loop=open_loop, tiers=tiers)
        for machine, agents, tiers, humans, open_loop in product(
            MACHINES, (4, 16, 64), TIERS, (False, True), (False, True)
        )
    ]


def run(job: tuple[Config, str, int, tuple[str, ...]]) -> Cell:
    """Figures by policy, means over seeds."""
    config, trace, seeds, policies = job
    source = load(trace) if trace else synthetic(sessions=120)
    host, disk = TIERS[config.tiers]
    costs = costs_for(**MACHINES[config.machine], host_bytes=host * GIB, disk_bytes=disk * GIB)
    loads = [
        workload(
            source, agents=config.agents, seed=seed, sessions=max(32, 2 * config.agents), costs=costs,
            window_tokens=WINDOW.get(config.machine, 131_072), humans=config.humans, open_loop=config.open_loop,
        )
        for seed in range(seeds)
    ]  # fmt: skip
    return {row.policy: {name: row[name] for name in NAMES} for row in compare(policies, costs, loads)}


def closed(rows: Cell, policy: str) -> float:
    """The share of the gap in mean task time between LRU and Belady that `policy` closes; NaN where there is none."""
    if "belady" not in rows:
        return math.nan
    lru, best = rows["lru"]["task_mean_s"], rows["belady"]["task_mean_s"]
    return (lru - rows[policy]["task_mean_s"]) / (lru - best) if lru - best > 1e-6 * lru else math.nan


class Kept:
    """What `--keep` has: a line for each configuration that is done, by everything that decides its figures."""

    def __init__(self, path: str) -> None:
        self._path = Path(path) if path else None
        self._cells: dict[str, Cell] = {}
        if self._path is not None and self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                told = json.loads(line)
                self._cells.setdefault(told["key"], {}).update(told["rows"])

    def take(self, job: tuple[Config, str, int, tuple[str, ...]]) -> Cell:
        """The policies of `job` that are done."""
        cell = self._cells.get(_key(job), {})
        return {name: cell[name] for name in job[-1] if name in cell}

    def add(self, job: tuple[Config, str, int, tuple[str, ...]], rows: Cell) -> None:
        """These are done now."""
        if self._path is not None and rows:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"key": _key(job), "rows": rows}) + "\n")


def _key(job: tuple[Config, str, int, tuple[str, ...]]) -> str:
    config, trace, seeds, _ = job
    return f"{config.name} {Path(trace).name or 'synthetic'} {seeds}"


def figures(results: dict[Config, Cell]) -> dict[str, Any]:
    """The keys of bars.toml. P95 stalls: geometric means over the configurations of that kind in which LRU keeps
    anybody waiting, and the worst of them beside it.
    """

    def ratio(config: Config, figure: str) -> float:
        lazy, lru = results[config]["lazy"][figure], results[config]["lru"][figure]
        return lazy / lru if lru else 1.0

    def stalls(some: list[Config]) -> list[float]:
        return [ratio(each, "stall_p95_s") for each in some if results[each]["lru"]["stall_p95_s"] >= NO_STALL_S]

    task = {
        config: rows["lazy"]["task_mean_s"] / min(rows[name]["task_mean_s"] for name in RIVALS if name in rows)
        for config, rows in results.items()
    }
    cases = {
        "slow_link": stalls([each for each in results if each.machine == "8b-24gb"]),
        "host_full": stalls(
            [each for each in results if each.tiers == "64" and results[each]["lru"]["hit_share"] < FULL]
        ),
        "open_loop": stalls([each for each in results if each.open_loop]),
    }
    return (
        {"worst_task_time_vs_best_baseline": max(task.values())}
        | {f"p95_stall_vs_lru_{case}": _geometric(some) for case, some in cases.items()}
        | {f"worst_p95_stall_vs_lru_{case}": max(some, default=None) for case, some in cases.items()}
        | {
            "bytes_vs_lru": _geometric([ratio(each, "moved_bytes") for each in results]),
            "worst_bytes_vs_lru": max(ratio(each, "moved_bytes") for each in results),
            "gap_closed": _median([closed(rows, "lazy") for rows in results.values()]),
            "worst_task_time_in": max(task, key=lambda config: task[config]).name,
            "configurations": len(results),
        }
    )


def _geometric(values: list[float]) -> float | None:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else None


def _median(values: list[float]) -> float | None:
    known = sorted(value for value in values if not math.isnan(value))
    return known[len(known) // 2] if known else None


def table(results: dict[Config, Cell], figure: str, policies: tuple[str, ...]) -> str:
    """Markdown: a line for each configuration, each policy relative to LRU; LRU itself in seconds."""
    lines = ["| configuration | lru, s | " + " | ".join(policies) + " |", "| --- " * (len(policies) + 2) + "|"]
    for config, rows in results.items():
        base = rows["lru"][figure]
        cells = [f"{rows[name][figure] / base:.3f}" if base and name in rows else "-" for name in policies]
        lines.append(f"| {config.name} | {base:,.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    args = arguments(
        __doc__ or "",
        trace=(str, "", "a trace file; empty: a made-up one"),
        full=(int, 0, "1: the whole matrix (many minutes)"),
        only=(str, "", "configurations whose name contains one of these, with commas between"),
        seeds=(int, 1, "orders of sessions for each configuration"),
        policies=(str, "", "names with commas between; empty: all"),
        rows=(int, 0, "1: print the tables as Markdown"),
        jobs=(int, 1, "processes"),
        keep=(str, "", "a file for what is done; what is there is not run again"),
    )
    configs = matrix() if args.full else list(SUBSET)
    if args.only:
        configs = [each for each in configs if any(part in each.name for part in args.only.split(","))]
    everybody = (*OURS, *BASELINES, *BOUNDS, INFINITE) if args.full else (*OURS, *BASELINES, "belady", INFINITE)
    names = tuple(args.policies.split(",")) if args.policies else everybody
    policies = tuple(dict.fromkeys(("lru", "lazy", *names)))
    trace = str(Path(args.trace)) if args.trace else ""
    results: dict[Config, Cell] = {}
    began_s = time.monotonic()
    kept = Kept(args.keep)
    jobs = [(config, trace, args.seeds, policies) for config in configs]
    there = [kept.take(job) for job in jobs]
    left = [(*job[:-1], tuple(n for n in policies if n not in done)) for job, done in zip(jobs, there, strict=True)]
    with ProcessPoolExecutor(args.jobs) as pool:
        for job, done, fresh in zip(left, there, pool.map(run, left), strict=True):
            config, rows = job[0], {**done, **fresh}
            kept.add(job, fresh)
            results[config] = {name: rows[name] for name in policies}
            lazy, lru = rows["lazy"], rows["lru"]
            say(
                args,
                f"{config.name:36} task {lazy['task_mean_s'] / lru['task_mean_s']:.3f} of LRU, "
                f"P95 stall {lazy['stall_p95_s']:.2f} / {lru['stall_p95_s']:.2f} s "
                f"({time.monotonic() - began_s:.0f} s)",
            )
    if args.rows:
        shown = tuple(name for name in policies if name != "lru")
        for figure in ("task_mean_s", "stall_p95_s", "moved_bytes"):
            print(f"\n{figure}\n\n{table(results, figure, shown)}")
    emit(args, figures(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
