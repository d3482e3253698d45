"""`agentkv replay`: recorded runs in the simulator, what was measured beside what is predicted. Reckoning is `sim/`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from agentkv.units import format_seconds


def register(app: typer.Typer) -> None:
    """Add the command to the `agentkv` program."""
    app.command()(replay)


def replay(
    records: Annotated[list[Path], typer.Argument(help="Files that `agentkv demo --record FILE` wrote.")],
    *,
    draws: Annotated[int, typer.Option(min=1, help="Replays of each, on a machine as uneven as it was.")] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Hold the simulator against what really happened: mean resume stalls and task times of recorded runs.

    What a step costs is fitted to each record's own calls; stalls and task times are not. One run is one draw of many:
    compare the means over several.
    """
    rows = [_row(path, draws) for path in records]
    both = {side: _mean(rows, side) for side in ("measured", "predicted")}
    errors = {
        f"{what}_error": _error(both["predicted"][f"{what}_s"], both["measured"][f"{what}_s"])
        for what in ("stall", "task_time")
    }
    if as_json:
        typer.echo(json.dumps({**errors, "runs": rows}))
        return
    table = Table(title="Mean resume stall and task time: measured, and predicted with its spread over draws")
    for column in ("record", "stall", "predicted", "task", "predicted"):
        table.add_column(column, justify="left" if column == "record" else "right")
    for row in rows:
        spread_s = format_seconds(row["predicted"]["stall_spread_s"])
        stalls = (format_seconds(row[side]["stall_s"]) for side in ("measured", "predicted"))
        tasks = (format_seconds(row[side]["task_time_s"]) for side in ("measured", "predicted"))
        was, said = stalls
        table.add_row(row["record"], was, f"{said} +- {spread_s}", *tasks)
    console = Console()
    console.print(table)
    console.print(
        f"Over all runs the mean stall is off by {errors['stall_error']:.0%}, the mean task time by "
        f"{errors['task_time_error']:.0%}.",
        highlight=False,
    )


def _row(path: Path, draws: int) -> dict[str, Any]:
    from agentkv.sim import record as records
    from agentkv.sim.replay import drawn
    from agentkv.sim.steptimes import calibrated, machine_pace

    record = records.read(path)
    costs = calibrated(record)
    told = drawn(record, costs, pace=machine_pace(record, costs), draws=draws)
    stalls_s = [one.stall_mean_s for one in told]
    return {
        "record": path.name,
        "measured": {
            "stall_s": statistics.fmean(record.stalls_s or (0.0,)),
            "task_time_s": statistics.fmean(record.tasks_s),
        },
        "predicted": {
            "stall_s": statistics.fmean(stalls_s),
            "stall_spread_s": statistics.pstdev(stalls_s),
            "task_time_s": statistics.fmean(one.task_mean_s for one in told),
        },
    }


def _mean(rows: list[dict[str, Any]], side: str) -> dict[str, float]:
    return {name: statistics.fmean(row[side][name] for row in rows) for name in ("stall_s", "task_time_s")}


def _error(predicted: float, measured: float) -> float:
    from agentkv.sim.replay import relative_error

    return relative_error(predicted, measured)
