"""`agentkv report`: the bill of a task from a saved ledger, on the console, as JSON or as a page; or all tasks at once."""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import suppress
from datetime import datetime, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentkv.cli.paint import show
from agentkv.cli.times import since_ms
from agentkv.errors import ConfigError

if TYPE_CHECKING:
    from agentkv.budget.facts import Fact
    from agentkv.budget.store import Store


def register(app: typer.Typer) -> None:
    """Add the command to the `agentkv` program."""
    app.command()(report)


def report(  # noqa: PLR0917  a command's options are parameters
    task: Annotated[
        str | None, typer.Argument(help="The task whose bill to print; without it, the tasks are listed.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; its schema is agentkv/budget/bill.schema.json.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option("--html", help="Write the bill as one page that needs no network.", metavar="FILE")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="All tasks: a line each, cost per completed task of a type, cost per day.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option(
            help="Only what happened from then on: today, 12h, 7d, 2026-11-01, 2026-11-01T14:30.", metavar="TIME"
        ),
    ] = None,
    zone: Annotated[
        str | None, typer.Option(help="The time zone of days and times, as Asia/Shanghai; by default this machine's.")
    ] = None,
    runs: Annotated[
        bool,
        typer.Option(
            "--all-runs",
            help="Add up what all runs of your programs spent on the task, not the last one only; --all does so anyway.",
        ),
    ] = False,
    ledger: Annotated[
        str | None, typer.Option(help="A database URL; by default the ledger in your data folder.")
    ] = None,
) -> None:
    """Print what tasks cost.

    Examples: `agentkv report`, `agentkv report invoice-42`, `agentkv report invoice-42 --html bill.html`,
    `agentkv report --all --since today`.
    """
    from agentkv.budget.store import read_ledger

    if html is not None and (as_json or every or task is None):
        raise ConfigError("--html writes the bill of one task: name the task, without --json and --all")
    if every and task is not None:
        raise ConfigError(f"--all reports every task; leave {task!r} or --all out")
    where = None if zone is None else _zone(zone)
    moment_ms = None if since is None else _since(since, where)
    saved = read_ledger(ledger)
    try:
        if task is not None:
            _one(saved, task, as_json=as_json, html=html, moment_ms=moment_ms, zone=where, runs=runs)
        elif every:
            _all(saved, as_json=as_json, moment_ms=moment_ms, zone=where)
        else:
            _names(saved, as_json=as_json, moment_ms=moment_ms)
    finally:
        saved.close()


def _one(
    saved: Store, task: str, *, as_json: bool, html: Path | None, moment_ms: int | None, zone: tzinfo | None, runs: bool
) -> None:
    from agentkv.budget.bill import Bill

    facts = _facts(saved, task, moment_ms, runs=runs)
    if not facts:
        _without_facts(saved, task, as_json=as_json)
        return
    bill = Bill.from_facts(task, facts)
    if html is not None:
        from agentkv.budget.html import page

        _write(page(bill, zone=zone), html)
        typer.echo(f"written to {html}", err=True)
    elif as_json:
        typer.echo(json.dumps(bill.to_json()))
    else:
        show(str(bill))
    if not runs:
        _tell_of_others(saved, task, moment_ms)


def _tell_of_others(saved: Store, task: str, moment_ms: int | None) -> None:
    """A bill of the last run is not all that the task cost."""
    others = len(saved.database.runs(task, moment_ms)) - 1
    if others > 0:
        which = "an earlier run" if others == 1 else f"{others:,} earlier runs"
        typer.echo(f"This is the last run; {which} of the task spent more: --all-runs adds them up.", err=True)


def _without_facts(saved: Store, task: str, *, as_json: bool) -> None:
    """A task that was pruned may have left its totals; of others there is nothing to tell."""
    kept = saved.kept_bill(task)
    if kept is None:
        what = "No task" if not _is_known(saved, task) else "Nothing in that time of task"
        typer.echo(f"{what} {task!r} in this ledger. `agentkv report` lists the tasks that it holds.", err=True)
        raise typer.Exit(1)
    if as_json:
        typer.echo(json.dumps(kept))
        return
    typer.echo(f"Only totals are left of {task!r}, its events were pruned:")
    for name, value in kept.items():
        if isinstance(value, int | float | str | None) and name not in ("v", "task"):
            typer.echo(f"  {name:<24}{value}")


def _is_known(saved: Store, task: str) -> bool:
    return task in saved.tasks()


def _facts(saved: Store, task: str, moment_ms: int | None, *, runs: bool) -> list[Fact]:
    from agentkv.budget.database import ALL_RUNS

    facts = saved.load(task, run=ALL_RUNS if runs else None)
    return facts if moment_ms is None else [fact for fact in facts if fact.at_ms >= moment_ms]


def _names(saved: Store, *, as_json: bool, moment_ms: int | None) -> None:
    tasks = saved.tasks() if moment_ms is None else [runs[0].task for runs in saved.database.spoken(moment_ms)]
    if as_json:
        typer.echo(json.dumps(tasks))
    elif tasks:
        from agentkv.budget.names import clean

        typer.echo("\n".join(clean(task) for task in tasks))
    else:
        when = "" if moment_ms is None else " in that time"
        typer.echo(f"The ledger is empty{when}: no task has run yet. Try `agentkv demo`.")


def _all(saved: Store, *, as_json: bool, moment_ms: int | None, zone: tzinfo | None) -> None:
    from agentkv.budget.overview import overview
    from agentkv.budget.readbills import bills

    left = saved.database.kept(None, None)
    pruned = [totals for *_, totals in left if (totals.get("started_ms") or 0) >= (moment_ms or 0)]
    now_ms = saved.database.time_ms()
    seen = overview(bills(saved.database, since_ms=moment_ms), now_ms=now_ms, zone=zone, pruned=pruned)
    typer.echo(json.dumps(seen.to_json()) if as_json else str(seen))


def _zone(name: str) -> tzinfo:
    from agentkv.budget.days import zone_of

    return zone_of(name, what="--zone")


def _since(text: str, zone: tzinfo | None) -> int:
    """A day or a moment without an offset is one of `zone`."""
    from agentkv.budget.days import day_of, day_start_ms

    if text.strip() == "today":
        return day_start_ms(day_of(time.time_ns() // 1_000_000, zone), zone)
    moment: datetime | None = None
    with suppress(ValueError):
        moment = datetime.fromisoformat(text.strip())
    if moment is not None and moment.tzinfo is None and zone is not None:
        return round(moment.replace(tzinfo=zone).timestamp() * 1000)
    return since_ms(text, option="--since")


def _write(text: str, output: Path) -> None:
    """The whole page or nothing, readable for its owner alone until he shares it."""
    try:
        handle, name = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}") from error
    part = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
            file.write(text)
        part.replace(output)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
