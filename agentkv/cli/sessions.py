"""`agentkv sessions`: which sessions wait on disk for the next process, and forgetting them.

Works without torch and while a process uses the store (listing only). The notes' text is written by `kv/keep.py`;
whatever is missing or odd in one is shown as unknown.
"""

from __future__ import annotations

import json
import re
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from agentkv.errors import ConfigError
from agentkv.kv.store import StoreFacts, default_root, drop_notes, stores
from agentkv.units import format_bytes, format_seconds

_SHOWN_CHARACTERS = 60
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DAY_S = 86400
_Disk = Annotated[
    Path | None,
    typer.Option(help="The folder given as disk= to the engine; by default `kv` in the user's cache folder."),
]
_group = typer.Typer(
    help="Sessions that wait on disk for the next process: list them, or drop them.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the commands to the `agentkv` program."""
    app.add_typer(_group, name="sessions")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    """One note, as far as it can be read."""

    store: StoreFacts
    note: str
    session: str
    task: str | None
    model: str | None
    tokens: int | None
    size_bytes: int | None
    used_at_s: float | None

    def to_json(self) -> dict[str, Any]:
        return {
            "session": self.session,
            "task": self.task,
            "model": self.model,
            "tokens": self.tokens,
            "bytes": self.size_bytes,
            "used_at": self.used_at_s,
            "store": self.store.name,
            "path": str(self.store.path),
            "held_by": self.store.held_by,
        }


@_group.command("list")
def list_sessions(
    disk: _Disk = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead of a table.")] = False,
) -> None:
    """Show the saved sessions, the last used first.

    A session is saved while an engine runs with persist=True; the next engine on the same folder and model resumes it
    without computing its context again.
    """
    root = disk or default_root()
    saved = _saved(root)
    if as_json:
        typer.echo(json.dumps([one.to_json() for one in saved]))
        return
    if not saved:
        typer.echo(f"No session is saved at {root}. Engines save them with persist=True.")
        return
    _show(saved)


@_group.command("drop")
def drop_sessions(
    names: Annotated[list[str] | None, typer.Argument(help="Sessions to drop, as listed.", metavar="NAME...")] = None,
    all_of_them: Annotated[bool, typer.Option("--all", help="Drop all that are saved here.")] = False,
    older_than: Annotated[
        str | None, typer.Option(help="Drop those not used for so long: 30m, 12h, 7d, 2w.", metavar="TIME")
    ] = None,
    disk: _Disk = None,
) -> None:
    """Forget saved sessions: the next engine computes their context anew, should they come back.

    Their text is erased at once. Their KV blocks are given up when an engine starts on the store again, or with the
    store's files once no session is left in it. While a living process has the store nothing can be dropped; the
    message names it.

    Examples: `agentkv sessions drop run-7:coder`, `agentkv sessions drop --older-than 7d`.
    """
    chosen = set(names or ())
    if not chosen and not all_of_them and older_than is None:
        raise typer.BadParameter("name the sessions to drop, or give --all or --older-than; `list` shows them")
    before_s = None if older_than is None else time.time() - _seconds(older_than)
    saved = _saved(disk or default_root())
    unknown = chosen - {one.session for one in saved} - {one.note for one in saved}
    if unknown:
        told = ", ".join(sorted(_printable(name) for name in unknown))
        raise ConfigError(f"no saved session is called {told}; `agentkv sessions list` shows those that there are")
    going = [one for one in saved if not chosen or {one.session, one.note} & chosen]
    if before_s is not None:
        going = [one for one in going if (one.used_at_s or 0.0) < before_s]
    by_store: dict[Path, list[_Saved]] = defaultdict(list)
    for one in going:
        by_store[one.store.path].append(one)
    dropped = 0
    for of_store in by_store.values():
        dropped += len(drop_notes(of_store[0].store, [one.note for one in of_store]))
    typer.echo(f"{dropped} of {len(saved)} saved sessions dropped.")


def _saved(root: Path) -> list[_Saved]:
    """All notes of all stores, the last used first."""
    found = [_read(store, name, payload) for store in stores(root) for name, payload in store.notes.items()]
    return sorted(found, key=lambda one: (-(one.used_at_s or 0.0), one.session))


def _read(store: StoreFacts, name: str, payload: bytes) -> _Saved:
    try:
        note = json.loads(payload)
    except (ValueError, RecursionError):
        note = None
    note = note if isinstance(note, dict) else {}

    def text(field: str) -> str | None:
        value = note.get(field)
        return value if isinstance(value, str) and value else None

    def number(field: str) -> float | None:
        value = note.get(field)
        good = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1 << 62
        return value if good else None

    tokens, size_bytes, keys = number("tokens"), number("bytes"), note.get("keys")
    if size_bytes is None and isinstance(keys, list):
        size_bytes = len(keys) * store.block_bytes
    return _Saved(
        store=store,
        note=name,
        session=text("session") or name,
        task=text("task"),
        model=text("model"),
        tokens=None if tokens is None else int(tokens),
        size_bytes=None if size_bytes is None else int(size_bytes),
        used_at_s=number("used_at"),
    )


def _show(saved: list[_Saved]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    now_s = time.time()
    table = Table(box=None, pad_edge=False)
    for column in ("session", "task", "model"):
        table.add_column(column)
    for column in ("tokens", "size", "last used"):
        table.add_column(column, justify="right")
    for one in saved:
        cells = (
            _printable(one.session),
            _printable(one.task or "-"),
            _printable(one.model or "-"),
            "-" if one.tokens is None else f"{one.tokens:,}",
            "-" if one.size_bytes is None else format_bytes(one.size_bytes),
            "-" if one.used_at_s is None else _ago(now_s - one.used_at_s),
        )
        table.add_row(*(Text(cell) for cell in cells))
    Console().print(table)
    for path, held_by in sorted({(one.store.path, one.store.held_by) for one in saved}, key=str):
        size_bytes = next(one.store.size_bytes for one in saved if one.store.path == path)
        state = f"in use by {held_by}" if held_by else "not in use"
        typer.echo(f"{format_bytes(size_bytes)} at {path}, {state}")


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw])", text.strip())
    if found is None:
        raise typer.BadParameter(f"--older-than {text!r}: write for instance 30m, 12h, 7d or 2w")
    return float(found[1]) * _UNITS_S[found[2]]


def _ago(seconds: float) -> str:
    if seconds >= 2 * _DAY_S:
        return f"{seconds / _DAY_S:.0f} days ago"
    if seconds >= _UNITS_S["h"]:
        return f"{seconds / _UNITS_S['h']:.1f} h ago"
    return f"{format_seconds(max(0.0, round(seconds)))} ago"


def _printable(text: str) -> str:
    """Session ids come from outside: nothing in them steers a terminal."""
    shown = "".join(one if one.isprintable() else f"\\x{ord(one):02x}" for one in text[: 2 * _SHOWN_CHARACTERS])
    return (
        shown if len(shown) <= _SHOWN_CHARACTERS and len(text) <= len(shown) else shown[: _SHOWN_CHARACTERS - 3] + "..."
    )
