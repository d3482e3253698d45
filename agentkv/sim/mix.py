"""The calibration of made-up traces: which tools agents call how often, and how long that takes.

Named tools and commands have the published P50 / P90 / P99 of software-engineering tasks where there are any; the rest
is filled in so that all calls together have TraceLab's shares: 61 % below 1 s, 27 % to 10 s, 8 % to 60 s, 4 % above,
and those hold about 85 % of the time. Each line says where its figures come from; tests hold the totals.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

Z10, Z25, Z50, Z75, Z90, Z95, Z99, Z999 = -1.2816, -0.6745, 0.0, 0.6745, 1.2816, 1.6449, 2.3263, 3.0902
"""Standard normal quantiles."""


class Spread:
    """Seconds (or tokens) by standard normal score: log-linear between the given quantiles and beyond the outer ones."""

    def __init__(self, *points: tuple[float, float], most: float = math.inf) -> None:
        self._zs = [z for z, _ in points]
        self._logs = [math.log(value) for _, value in points]
        self._most = most

    def at(self, z: float) -> float:
        """The value at score `z`: `at(Z90)` is P90."""
        index = min(max(bisect.bisect_right(self._zs, z), 1), len(self._zs) - 1)
        z0, z1 = self._zs[index - 1], self._zs[index]
        y0, y1 = self._logs[index - 1], self._logs[index]
        return min(self._most, math.exp(y0 + (y1 - y0) * (z - z0) / (z1 - z0)))


def spread(p50: float, p90: float, p99: float, p999: float | None = None) -> Spread:
    """From three or four published quantiles; below the median as steep as above it."""
    points = [(Z50, p50), (Z90, p90), (Z99, p99)]
    return Spread(*points, *([(Z999, p999)] if p999 is not None else []), most=6 * 3600.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What an agent calls. `share`: of all calls. `timeouts`: (seconds, share of its calls that declare it)."""

    tool: str
    command: str
    share: float
    spread: Spread
    arg_bytes: int
    timeouts: Sequence[tuple[float, float]] = ()


_SHELL = ((120.0, 0.35), (30.0, 0.05))
"""Time-outs that show as spikes in published traces."""

COMMANDS: tuple[Command, ...] = (
    # published for SWE tasks
    Command(tool="read", command="", share=0.065, spread=spread(0.03, 0.11, 0.4), arg_bytes=60),
    Command(tool="edit", command="", share=0.045, spread=spread(0.03, 0.07, 0.11), arg_bytes=900),
    Command(tool="grep", command="", share=0.030, spread=spread(0.05, 0.13, 0.14), arg_bytes=50),
    Command(tool="agent", command="", share=0.062, spread=spread(62, 98, 192, 14_400), arg_bytes=1500),
    Command(tool="bash", command="pytest", share=0.085, spread=spread(1.7, 9.6, 92), arg_bytes=70, timeouts=_SHELL),
    Command(
        tool="bash", command="pip install", share=0.020, spread=spread(1.8, 6.8, 40), arg_bytes=40, timeouts=_SHELL
    ),
    Command(tool="bash", command="git diff", share=0.050, spread=spread(0.1, 0.17, 0.23), arg_bytes=30),
    # ours, so that the totals come out
    Command(tool="bash", command="git status", share=0.035, spread=spread(0.15, 0.3, 0.6), arg_bytes=20),
    Command(tool="bash", command="git commit", share=0.015, spread=spread(0.3, 1.2, 5), arg_bytes=120),
    Command(tool="bash", command="ls", share=0.050, spread=spread(0.3, 0.6, 1.5), arg_bytes=30),
    Command(tool="bash", command="sed", share=0.050, spread=spread(0.3, 0.7, 1.5), arg_bytes=60),
    Command(tool="bash", command="find", share=0.030, spread=spread(0.5, 1.5, 6), arg_bytes=60),
    Command(tool="bash", command="rg", share=0.050, spread=spread(0.4, 0.9, 3), arg_bytes=50),
    Command(
        tool="bash", command="python", share=0.200, spread=spread(1.0, 2.0, 14, 14_400), arg_bytes=400, timeouts=_SHELL
    ),
    Command(tool="bash", command="curl", share=0.025, spread=spread(0.8, 2.5, 12), arg_bytes=90, timeouts=_SHELL),
    Command(
        tool="bash", command="npm run", share=0.024, spread=spread(4, 14, 60, 14_400), arg_bytes=40, timeouts=_SHELL
    ),
    Command(tool="bash", command="make", share=0.022, spread=spread(4, 20, 300, 20_000), arg_bytes=30, timeouts=_SHELL),
    Command(tool="bash", command="ruff check", share=0.020, spread=spread(0.5, 1.2, 4), arg_bytes=30),
    Command(tool="bash", command="mypy", share=0.012, spread=spread(3, 9, 30), arg_bytes=30, timeouts=_SHELL),
    Command(tool="bash", command="sleep", share=0.010, spread=spread(10, 45, 300), arg_bytes=10, timeouts=_SHELL),
    Command(tool="web", command="search", share=0.060, spread=spread(5, 18, 45), arg_bytes=80),
    Command(tool="web", command="fetch", share=0.032, spread=spread(2.5, 8, 25), arg_bytes=110),
    Command(tool="plan", command="", share=0.008, spread=spread(0.01, 0.03, 0.1), arg_bytes=400),
)

HUMAN = Spread((Z10, 16), (Z25, 40), (Z50, 127), (Z75, 409), (Z90, 1543), (Z95, 3088), (Z99, 6854), most=172_800.0)
"""Waits for a person: published for 773 coding sessions (seconds)."""

OUTPUT = Spread((-1.6449, 89), (Z25, 137), (Z50, 215), (Z75, 423), (Z95, 1528), (Z99, 3643), most=32_000)
"""Tokens of one answer, from the same."""

RESULT = Spread((-1.6449, 10), (Z25, 80), (Z50, 280), (Z75, 1000), (Z90, 2900), (Z95, 5700), (Z99, 16_500), most=60_000)
"""Tokens that a tool's result or a person's text adds."""

FIRST = Spread((-1.6449, 10_300), (Z25, 19_000), (Z50, 25_000), (Z75, 96_000), (Z95, 220_000), most=350_000)
"""Tokens of a session's first prompt."""

STEPS = Spread((-1.6449, 3), (Z25, 13), (Z50, 38), (Z75, 88), (Z95, 227), (Z99, 329), most=600)
"""Model calls of a session."""
