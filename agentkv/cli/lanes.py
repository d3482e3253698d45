"""The plot of `agentkv simulate`: tier occupancy over time, and a lane for each task, as PNG or SVG."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from agentkv.cli import plot as plots
from agentkv.errors import ConfigError

if TYPE_CHECKING:
    from agentkv.sim.result import Lane, Result

MOST_LANES = 48
_COLORS = {"queue": "tab:red", "load": "tab:orange", "run": "tab:green", "wait": "lightgray"}


def draw(path: Path, result: Result, *, title: str) -> None:
    """Write the plot of one run that kept its lanes. Raises as `plot.check`, and ConfigError if it cannot write."""
    plots.check(path)
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = dict(list((result.lanes or {}).items())[:MOST_LANES])
    figure = Figure(figsize=(11, 4 + 0.16 * len(lanes)), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, max(2, 0.2 * len(lanes))])
    steps = result.occupancy or []
    times = [step[0] for step in steps]
    for place, (name, color) in enumerate(
        (("device", "tab:red"), ("host", "tab:blue"), ("disk", "tab:green")), start=1
    ):
        gib = [step[place] * result.block_bytes / 2**30 for step in steps]
        if any(gib):
            above.step(times, gib, where="post", color=color, label=name)
    above.set_ylabel("GiB held")
    above.set_title(title)
    above.legend(loc="upper right")
    above.grid(visible=True, alpha=0.3)
    for place, marks in enumerate(lanes.values()):
        for what, spans in _spans(marks).items():
            below.broken_barh(spans, (place - 0.4, 0.8), facecolors=_COLORS[what])
    below.set_ylabel("task")
    below.set_xlabel("seconds")
    below.invert_yaxis()
    below.legend(handles=[Patch(color=color, label=what) for what, color in _COLORS.items()], loc="upper right")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror or error}") from error


def _spans(marks: list[Lane]) -> dict[str, list[tuple[float, float]]]:
    """What a task did, as (begin, length) by kind."""
    found: dict[str, list[tuple[float, float]]] = {}
    for mark, after in pairwise(marks):
        if mark.what in _COLORS and after.time_s > mark.time_s:
            found.setdefault(mark.what, []).append((mark.time_s, after.time_s - mark.time_s))
    return found
