"""What every benchmark shares: the machine's description, interleaved repeats, and the one JSON line at the end."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def arguments(description: str, **options: tuple[type, Any, str]) -> argparse.Namespace:
    """Parse `--json`, `--repeats` and the script's own options, given as name=(type, default, help)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print only the JSON object")
    for name, (kind, default, text) in options.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, help=f"{text} (default {default})"
        )
    return parser.parse_args()


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    cpu = platform.processor() or platform.machine()
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    return {
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def interleaved(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Run each side once per round, in alternating order, so that a slow minute hits all of them."""
    results: dict[str, list[float]] = {name: [] for name in sides}
    names = list(sides)
    for round_number in range(repeats):
        for name in names if round_number % 2 == 0 else reversed(names):
            results[name].append(sides[name]())
    return results


def a_over_a(values: list[float]) -> float:
    """The ratio between two halves of the same side: how far noise alone moves a ratio."""
    return statistics.median(values[::2]) / statistics.median(values[1::2]) if len(values) > 1 else 1.0


def median(values: list[float]) -> float:
    """The median."""
    return statistics.median(values)


def quantile(values: list[float], q: float) -> float:
    """The q-quantile (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))]


def say(args: argparse.Namespace, text: str) -> None:
    """A line for people, kept off the standard output when only JSON is wanted."""
    print(text, file=sys.stderr if args.json else sys.stdout, flush=True)


def emit(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """Print the result: a table for people, then the JSON object as the last line."""
    result = {**result, "machine": machine()}
    if not args.json:
        for key, value in result.items():
            print(f"{key:32} {value}")
    print(json.dumps(result))
