"""`agentkv ledger`: where the ledger is, whether it is sound, taking facts out of it, and forgetting old ones."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from agentkv.cli.times import age_s, since_ms
from agentkv.errors import ConfigError
from agentkv.units import format_bytes

_Ledger = Annotated[
    str | None,
    typer.Option(
        help="A database URL, such as sqlite:////data/l.sqlite or postgresql://me@host/agents; "
        "by default the ledger in your data folder."
    ),
]
_group = typer.Typer(
    help="The ledger of what every task spent: find it, check it, export it, prune it. "
    "Bills are printed by `agentkv report`.",
    no_args_is_help=True,
)


class Form(StrEnum):
    """What an export is written as."""

    JSONL = "jsonl"
    CSV = "csv"


def register(app: typer.Typer) -> None:
    """Add the commands to the `agentkv` program."""
    app.add_typer(_group, name="ledger")


@_group.command()
def path(
    ledger: _Ledger = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a line.")] = False,
) -> None:
    """Say where the ledger is and how large.

    The default one is SQLite in your data folder; AGENTKV_DATA moves it, AgentKV(..., ledger=URL) chooses another, and
    ledger="memory" saves nothing. A password in the URL is not shown. Nothing is made or changed.
    """
    from agentkv.budget.store import ledger_url

    name, file = _place(ledger_url(ledger))
    size_bytes = _size(file) if file is not None and file.exists() else None
    if as_json:
        typer.echo(json.dumps({"ledger": name, "exists": _exists(file), "bytes": size_bytes}))
        return
    state = {None: "", True: f"  {format_bytes(size_bytes or 0)}", False: "  (not there yet: the first run makes it)"}
    typer.echo(f"{name if file is None else file}{state[_exists(file)]}")


@_group.command()
def check(
    ledger: _Ledger = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
) -> None:
    """Read every row and say what is wrong; exit code 1 if anything is.

    A damaged ledger is never repaired by itself: copy it away, export what can be read with `agentkv ledger export`,
    and let the next run make a new one.
    """
    from agentkv.budget.check import check as check_database
    from agentkv.budget.database import Database
    from agentkv.budget.store import ledger_url

    database = Database(ledger_url(ledger), create=False)
    try:
        found = check_database(database)
    finally:
        database.close()
    if as_json:
        typer.echo(json.dumps(asdict(found)))
    else:
        typer.echo(f"{database.name}: version {found.version}, {found.tasks:,} tasks, {found.facts:,} facts")
        if found.unknown:
            typer.echo(f"{found.unknown:,} facts are of a kind that only a newer agentkv knows; bills leave them out")
        for problem in found.problems:
            typer.echo(f"wrong: {problem}", err=True)
        typer.echo("no fault found" if not found.problems else f"{len(found.problems)} faults")
    if found.problems:
        raise typer.Exit(1)


@_group.command()
def export(
    task: Annotated[
        str | None, typer.Argument(help="Only this task, of all its runs; `agentkv report` lists tasks.")
    ] = None,
    form: Annotated[
        Form, typer.Option("--format", help="jsonl: every field of every fact; csv: one table for a spreadsheet.")
    ] = Form.JSONL,
    since: Annotated[
        str | None,
        typer.Option(help="Only facts from then on, by the clock of the machine they happened on.", metavar="TIME"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Write to this file, readable for you alone.", metavar="FILE")
    ] = None,
    ledger: _Ledger = None,
) -> None:
    """Print the facts behind the bills, for other programs.

    One line per fact: model calls with tokens and cost, tool calls with predicted and actual waits, moves, folds, messages.
    They hold names, counts and times, no prompts and no tool arguments. A file is complete or not there.

    One task: `agentkv ledger export run-7`.

    A table of this week: `agentkv ledger export --format csv --since 7d -o week.csv`.

    Only what cost money: `agentkv ledger export --since 2026-11-01 | jq 'select(.kind == "model_call")'`.
    """
    from agentkv.budget.database import Database
    from agentkv.budget.export import lines
    from agentkv.budget.store import ledger_url

    moment_ms = None if since is None else since_ms(since, option="--since")
    database = Database(ledger_url(ledger), create=False)
    try:
        if task is not None and not database.has(task):
            typer.echo(f"No task {task!r} in this ledger. `agentkv report` lists the tasks that it holds.", err=True)
            raise typer.Exit(1)
        written = lines(database, task=task, since_ms=moment_ms, form=form.value)
        if output is None:
            _print(written)
        else:
            typer.echo(f"{_write(written, output):,} lines written to {output}", err=True)
    finally:
        database.close()


@_group.command()
def prune(
    older_than: Annotated[
        str, typer.Option(help="Forget tasks that were last saved so long ago: 12h, 30d, 8w.", metavar="TIME")
    ],
    keep_bills: Annotated[
        bool, typer.Option("--keep-bills", help="Keep each task's totals; only its single events go.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    ledger: _Ledger = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a line.")] = False,
) -> None:
    """Forget old tasks and give the space back.

    A task goes as a whole, when nothing of it was saved for so long: never half of a bill. Programs that are running may go on.
    SQLite's file becomes smaller; PostgreSQL gives space back by itself.

    Look first: `agentkv ledger prune --older-than 30d --dry-run`.

    Keep the totals: `agentkv ledger prune --older-than 30d --keep-bills`.
    """
    from agentkv.budget.database import Database
    from agentkv.budget.prune import prune as prune_database
    from agentkv.budget.store import ledger_url

    age = age_s(older_than, option="--older-than")
    database = Database(ledger_url(ledger), create=False)
    try:
        gone = prune_database(database, older_than_s=age, keep_bills=keep_bills, dry_run=dry_run)
    finally:
        database.close()
    if as_json:
        typer.echo(json.dumps(asdict(gone) | {"dry_run": dry_run}))
        return
    what = f"{gone.tasks:,} tasks with {gone.facts:,} facts"
    kept = "; their totals are kept" if keep_bills and gone.tasks else ""
    if dry_run:
        typer.echo(f"{what} would be forgotten{kept.replace('are', 'would be')}.")
        return
    typer.echo(f"{what} forgotten{kept}.")
    if gone.not_shrunk is not None:
        typer.echo(f"the file could not be made smaller ({gone.not_shrunk}); new facts will use the room", err=True)
    elif gone.before_bytes is not None and gone.after_bytes is not None and gone.facts:
        typer.echo(f"{format_bytes(gone.before_bytes)} -> {format_bytes(gone.after_bytes)}")


def _place(url: str) -> tuple[str, Path | None]:
    """The URL without its password, and SQLite's file."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise ConfigError(f"the ledger's URL cannot be read: {error}") from None
    is_file = parsed.get_backend_name() == "sqlite"
    return parsed.render_as_string(hide_password=True), Path(parsed.database or "") if is_file else None


def _exists(file: Path | None) -> bool | None:
    return None if file is None else file.exists()


def _size(file: Path) -> int:
    return sum(one.stat().st_size for one in (file, file.with_name(f"{file.name}-wal")) if one.exists())


def _print(lines: Iterable[str]) -> None:
    """What the console's encoding cannot say is written as an escape."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    for line in lines:
        sys.stdout.write(line)


def _write(lines: Iterable[str], output: Path) -> int:
    """Write a file beside the place, then put it there; the number of lines."""
    try:
        handle, name = tempfile.mkstemp(dir=output.parent, prefix=f".{output.name}.")  # mode 0600
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}") from error
    part = Path(name)
    written = 0
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            for line in lines:
                file.write(line)
                written += 1
        part.replace(output)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)
    return written
