"""The plot of `agentkv calibrate`: seconds by context length and way, both axes logarithmic, as PNG or SVG."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

from agentkv.errors import ConfigError, ExtraMissing
from agentkv.policy.cost import Crossover

_SUFFIXES = (".png", ".svg")


def check(path: Path) -> None:
    """Raises ConfigError or ExtraMissing now, if `draw` could not work after a long measurement."""
    if path.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--plot {path}: give a file that ends in .png or .svg")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.absolute().parent}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ExtraMissing("--plot needs matplotlib: pip install 'agentkv-sdk[plot]'")


def draw(path: Path, crossing: Crossover, *, title: str) -> None:
    """Write the plot to `path`, in the format of its suffix. Raises as `check`, and ConfigError if it cannot write."""
    check(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    tokens = [row.tokens for row in crossing.rows]
    axes.plot(tokens, [row.recompute_s for row in crossing.rows], "o-", color="tab:red", label="recompute")
    axes.plot(tokens, [row.host_s for row in crossing.rows], "s-", color="tab:blue", label="from host")
    disk = [row.disk_s for row in crossing.rows if row.disk_s is not None]
    if disk:
        axes.plot(tokens, disk, "^-", color="tab:green", label="from disk")
    for name, at, color in (
        ("host", crossing.host_tokens, "tab:blue"),
        ("disk", crossing.disk_tokens, "tab:green"),
    ):
        if at is not None and tokens[0] <= at <= tokens[-1]:
            axes.axvline(at, color=color, linestyle=":", label=f"{name} wins from {math.ceil(at)}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [str(each) for each in tokens])
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("seconds until it is on the device")
    axes.set_title(title)
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise ConfigError(f"--plot {path} cannot be written: {error.strerror or error}") from error
