"""The command line: how it is put together, and how our errors end it.

| file | command |
| --- | --- |
| doctor.py | `agentkv doctor` |
| serve.py | `agentkv serve` |
| calibrate.py | `agentkv calibrate`, with plot.py |
| report.py | `agentkv report` |
| ledger.py | `agentkv ledger path`, `check`, `export`, `prune` |
| plan.py | `agentkv plan` |
| simulate.py | `agentkv simulate`, with lanes.py |
| replay.py | `agentkv replay` |
| sessions.py | `agentkv sessions list`, `agentkv sessions drop` |
| prefix_check.py | `agentkv prefix-check` |

A command is a module with `register(app)`; add it to `COMMANDS`. Commands that need an agent framework (`agentkv demo`)
come from outside through the entry points `agentkv.commands`, each of them such a `register`.
"""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated

import typer

import agentkv
from agentkv.cli import calibrate, doctor, ledger, plan, prefix_check, replay, report, serve, sessions, simulate
from agentkv.errors import AgentKVError

COMMANDS = (doctor, serve, calibrate, plan, simulate, replay, report, ledger, sessions, prefix_check)
"""In the order in which `agentkv --help` lists them."""

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


for _command in COMMANDS:
    _command.register(app)


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
