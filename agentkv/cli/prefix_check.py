"""`agentkv prefix-check`: for each recorded or live model call where its prompt breaks and why; a gate for CI.

Comparing is `context/check.py`; the format of records is in `context/bodies.py` and docs/prefix.md.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from agentkv.errors import ConfigError

if TYPE_CHECKING:
    from agentkv.context.check import Check, Checked

MAX_LINE_BYTES = 256 << 20
REFUSED = (ValueError, TypeError, AttributeError, RecursionError)
"""What reading a line may end with: everything in it may be of any type."""
SESSION_CHARS = 16
SHOWN_CHARS = 12


def register(app: typer.Typer) -> None:
    """Add the command to the `agentkv` program."""
    app.command()(prefix_check)


def prefix_check(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE|SCRIPT",
            help="JSON lines, each the body of a chat-completions request; or a .py file, which is run.",
        ),
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments for SCRIPT, after --.")] = None,
    *,
    max_breaks: Annotated[
        int | None, typer.Option(min=0, help="Exit with 1 if more calls than this break the prefix.")
    ] = None,
    min_append: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Exit with 1 if a smaller share of calls than this extends the one before."
        ),
    ] = None,
    lifetime_s: Annotated[
        float, typer.Option(min=0.0, help="Seconds for which the provider keeps a cache that nobody uses.")
    ] = 300.0,
    min_tokens: Annotated[int, typer.Option(min=0, help="The shortest prompt that the provider caches.")] = 1024,
    every: Annotated[bool, typer.Option("--all", help="List every call, not only those with a cause.")] = False,
    text: Annotated[
        bool, typer.Option("--text", help="Show the characters that differ (prompt text: mind where it is kept).")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Find what breaks the prompt cache: for each model call the place where its prompt differs from the one before.

    A prompt is cached as far as it begins with the same bytes as the one before. A clock in the system prompt, tools
    in another order, a history that is edited: everything behind the first changed byte is computed again and paid in
    full, at every call. Each break is listed with its place, the name of its cause, and the tokens that it cost.

    TRACE: one JSON object per line, {"model", "messages", "tools"}, and where known "session", "usage" (with cached
    tokens), "time" and "response". SCRIPT: every call that an AgentKV in it makes is watched; no recording is needed.

    In CI: agentkv prefix-check trace.jsonl --max-breaks 0
    """
    from agentkv.context.check import Check
    from agentkv.context.tokens import count_text

    if not source.is_file():
        raise ConfigError(f"{source} is no file; give a trace (JSON lines) or a Python script")
    check = Check(count=count_text, lifetime_s=lifetime_s, min_tokens=min_tokens)
    rows: list[Checked] = []

    def take(row: Checked) -> None:
        if every or row.told.cause is not None:
            rows.append(row)

    bad: dict[str, Any] = {"lines": 0, "first": ""}
    problem = ""
    if source.suffix == ".py":
        problem = _run(source, arguments or [], check, take)
    else:
        _read(source, check, take, bad)
    if not check.calls and not problem:
        raise ConfigError(f"{source}: no model call found{_bad_words(bad)}")
    failures = _failures(check, max_breaks=max_breaks, min_append=min_append)
    if problem:
        failures.append(problem)
    if as_json:
        typer.echo(json.dumps(_summary(check, bad, failures) | {"rows": [_row(row, text=text) for row in rows]}))
    else:
        _print(check, rows, bad, failures, text=text)
    if failures:
        raise typer.Exit(1)


# -- where calls come from


def _read(path: Path, check: Check, take: Callable[[Checked], None], bad: dict[str, Any]) -> None:
    """Feed each line; one that is no request is counted and left out."""
    from agentkv.context.bodies import call_of

    with path.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES), b""), 1):
            if not line.strip():
                continue
            try:
                call = call_of(json.loads(line))
            except REFUSED as error:
                bad["lines"] += 1
                bad["first"] = bad["first"] or f"line {number}: {str(error)[:120] or type(error).__name__}"
                continue
            take(check.feed(call))


def _run(path: Path, arguments: list[str], check: Check, take: Callable[[Checked], None]) -> str:
    """Run the script with every model call watched; answers what went wrong, "" if nothing did.

    What it prints goes to standard error, so that standard output holds the report alone.
    """
    import threading

    from agentkv.context.explain import Seen, listen

    lock = threading.Lock()

    def heard(call: Seen) -> None:
        with lock:
            take(check.feed(call))

    argv, sys.argv = sys.argv, [str(path), *arguments]
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        with listen(heard), contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        return "" if end.code in (None, 0) else f"{path.name} ended with {str(end.code)[:200]}"
    except Exception as error:
        traceback.print_exc()
        return f"{path.name} failed: {type(error).__name__}"
    finally:
        sys.path.remove(str(path.parent.resolve()))
        sys.argv = argv
    return ""


# -- what is told


def _failures(check: Check, *, max_breaks: int | None, min_append: float | None) -> list[str]:
    failures = []
    if max_breaks is not None and check.breaks > max_breaks:
        failures.append(f"{check.breaks} breaks, at most {max_breaks} are allowed")
    if min_append is not None and check.append_share < min_append:
        failures.append(f"{check.append_share:.1%} of the calls extend the one before, {min_append:.1%} are asked for")
    return failures


def _summary(check: Check, bad: dict[str, Any], failures: list[str]) -> dict[str, Any]:
    return {
        "calls": check.calls,
        "sessions": check.sessions,
        "append_share": check.append_share,
        "breaks": check.breaks,
        "lost_tokens": check.lost_tokens,
        "causes": dict(check.causes.most_common()),
        "bad_lines": bad["lines"],
        "failures": failures,
    }


def _row(row: Checked, *, text: bool) -> dict[str, Any]:
    return {"session": row.session, **row.told.to_json(text=text)}


def _print(check: Check, rows: list[Checked], bad: dict[str, Any], failures: list[str], *, text: bool) -> None:
    console = Console()
    if rows:
        table = Table(title="Where prompts stop being an extension of the one before, and why")
        for column in ("session", "call", "cause", "where", "byte", "token", "lost"):
            table.add_column(column, justify="left" if column in ("session", "cause", "where") else "right")
        for row in rows:
            table.add_row(*_cells(row, text=text))
        console.print(table)
    console.print(
        f"{check.calls} calls in {check.sessions} sessions: {check.append_share:.1%} of those that follow another "
        f"extend it, {check.breaks} break it; {check.lost_tokens:,} tokens computed again.{_bad_words(bad)}",
        highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip
    from agentkv.context.explain import ADVICE

    for cause, times in check.causes.most_common():
        console.print(f"{cause} ({times}x): {ADVICE[cause]}", highlight=False, markup=False, soft_wrap=True)
    for failure in failures:
        console.print(f"FAILED: {failure}", highlight=False, markup=False, soft_wrap=True)


def _cells(row: Checked, *, text: bool) -> list[str]:
    from rich.markup import escape

    told = row.told
    where = told.role if told.cause is not None else ""
    if where and told.message >= 0:
        where = f"message {told.message} ({told.role})"
    if text and where:
        where += f"\nwas {told.before[:SHOWN_CHARS]!r}\nnow {told.after[:SHOWN_CHARS]!r}"
    cause: str = told.cause or ("first prompt" if told.call == 1 else "extends")
    if told.also is not None:
        cause += f"\n(and {told.also})"
    numbers = (str(told.byte), str(told.token), str(told.lost_tokens))
    return [escape(cell) for cell in (row.session[:SESSION_CHARS], str(told.call), cause, where, *numbers)]


def _bad_words(bad: dict[str, Any]) -> str:
    return f" {bad['lines']} lines were left out ({bad['first']})." if bad["lines"] else ""
