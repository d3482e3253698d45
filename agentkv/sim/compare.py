"""Compare: several policies on the same workloads, seed by seed, with bounds and intervals.

Covers runs, means with 95 % intervals over seeds, ratios to LRU write-through seed by seed, and the share of the gap
from LRU to the optimum that each policy closes. Does not print (`cli/simulate.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

from agentkv.errors import ConfigError
from agentkv.policy.catalogue import RULES, make_rules
from agentkv.sim.costs import Costs
from agentkv.sim.result import Result
from agentkv.sim.simulator import Simulator
from agentkv.sim.workload import Workload

INFINITE = "infinite"
"""The other bound: memory for everybody."""
BASE = "lru"
OPTIMUM = "belady"

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)
"""97.5 % points of Student's t for 1, 2, ... degrees of freedom; beyond them 2.1."""

Figure = Callable[[Result], float]
FIGURES: Mapping[str, Figure] = {
    each.name: (lambda result, name=each.name: float(getattr(result, name)))
    for each in fields(Result)
    if each.name not in ("policy", "block_bytes", "lanes", "occupancy")
} | {"moved_bytes": lambda result: result.moved_bytes}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A mean over seeds and the half-width of its 95 % interval (None of a single seed)."""

    mean: float
    half: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One policy over all seeds. `ratios`: to LRU, seed by seed. `closed`: the share of LRU's gap to the optimum in
    mean task time that it closes (None where there is no gap, or without both in the comparison).
    """

    policy: str
    figures: Mapping[str, Mean]
    ratios: Mapping[str, Mean]
    closed: float | None
    results: tuple[Result, ...]

    def __getitem__(self, figure: str) -> float:
        return self.figures[figure].mean


def compare(
    policies: Sequence[str],
    costs: Costs,
    workloads: Sequence[Workload],
    *,
    shared_tokens: int = 2048,
    lanes: bool = False,
    checked: bool = False,
    progress: Callable[[str, int], None] | None = None,
) -> list[Row]:
    """Every policy on every workload (one for each seed); LRU and the bounds are not added by themselves.

    `progress(policy, waits)` is called with the waits simulated since the last call. Raises ConfigError on unknown names.
    """
    for name in policies:
        if name != INFINITE and name not in RULES:
            raise ConfigError(f"policy={name!r} is unknown; there are {', '.join(sorted(RULES))} and {INFINITE}")
    results: dict[str, tuple[Result, ...]] = {}
    for name in dict.fromkeys(policies):
        runs = []
        for number, workload in enumerate(workloads):
            done = [0]

            def tell(waits: int, name: str = name, done: list[int] = done) -> None:
                if progress is not None:
                    progress(name, waits - done[0])
                    done[0] = waits

            simulator = Simulator(
                workload, costs, make_rules(BASE if name == INFINITE else name), infinite=name == INFINITE,
                shared_tokens=shared_tokens, lanes=lanes and number == 0, checked=checked, progress=tell,
            )  # fmt: skip
            runs.append(simulator.run())
            tell(workload.waits)
        results[name] = tuple(runs)
    return [_row(name, results) for name in results]


def _row(name: str, results: Mapping[str, tuple[Result, ...]]) -> Row:
    own, base, best = results[name], results.get(BASE), results.get(OPTIMUM)
    ratios = {}
    if base is not None:
        for figure, read in FIGURES.items():
            pairs = [(read(one), read(other)) for one, other in zip(own, base, strict=True)]
            ratios[figure] = mean([a / b if b else 1.0 if a == b else math.inf for a, b in pairs])
    closed = None
    if base is not None and best is not None:
        lru, optimum = (sum(each.task_mean_s for each in some) for some in (base, best))
        mine = sum(each.task_mean_s for each in own)
        closed = (lru - mine) / (lru - optimum) if lru - optimum > 1e-6 * lru else None
    return Row(
        policy=name, figures={figure: mean([read(each) for each in own]) for figure, read in FIGURES.items()},
        ratios=ratios, closed=closed, results=own,
    )  # fmt: skip


def mean(values: Sequence[float]) -> Mean:
    """Mean and 95 % half-width by Student's t."""
    n = len(values)
    middle = sum(values) / n
    if n == 1 or not math.isfinite(middle):
        return Mean(mean=middle, half=None)
    spread = math.sqrt(sum((value - middle) ** 2 for value in values) / (n - 1) / n)
    t = _STUDENT[n - 2] if n - 2 < len(_STUDENT) else 2.1
    return Mean(mean=middle, half=t * spread)
