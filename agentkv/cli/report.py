"""`agentkv report`: the bill of a task from a saved ledger."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command to the `agentkv` program."""
    app.command()(report)


def report(
    task: Annotated[
        str | None, typer.Argument(help="The task whose bill to print; without it, the tasks are listed.")
    ] = None,
    ledger: Annotated[
        str | None, typer.Option(help="A database URL; by default the ledger in your data folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Print the bill of a task from a saved ledger."""
    from agentkv.budget.bill import Bill
    from agentkv.budget.store import read_ledger

    saved = read_ledger(ledger)
    if task is None:
        tasks = saved.tasks()
        if as_json:
            typer.echo(json.dumps(tasks))
        elif tasks:
            typer.echo("\n".join(tasks))
        else:
            typer.echo("The ledger is empty: no task has run yet. Try `agentkv demo`.")
        return
    facts = saved.load(task)
    if not facts:
        typer.echo(f"No task {task!r} in this ledger. `agentkv report` lists the tasks that it holds.", err=True)
        raise typer.Exit(1)
    bill = Bill.from_facts(task, facts)
    typer.echo(json.dumps(bill.to_json()) if as_json else str(bill))
