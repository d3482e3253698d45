"""A ledger's facts for other programs: JSON lines with every field, or one CSV table for all kinds.

CSV: a name that a spreadsheet would take for a formula gets an apostrophe before it; task ids come from outside.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from io import StringIO
from typing import Any, get_args

from agentkv.budget.codec import fact_from_json, fact_to_json
from agentkv.budget.database import Database, SavedFact
from agentkv.budget.facts import Fact
from agentkv.budget.finite import finite
from agentkv.core.usage import Timing, Usage

_FORMULA = ("=", "+", "-", "@", "\t", "\r")
_FIRST = ("task", "run", "kind", "at_ms")


def lines(database: Database, *, task: str | None, since_ms: int | None, form: str) -> Iterator[str]:
    """The export line by line, with line ends, in the order of writing; "jsonl" also has the bills that were kept.

    Raises LedgerError, also on the way.
    """
    facts = (fact for page in database.pages(task, since_ms) for fact in page)
    if form == "csv":
        yield from _csv(facts)
        return
    for fact in facts:
        yield json.dumps(_in_full(fact)) + "\n"
    for name, run, saved_ms, totals in database.kept(task, since_ms):
        yield json.dumps({"task": name, "run": run, "kind": "kept_bill", "at_ms": saved_ms, "totals": totals}) + "\n"


def _in_full(saved: SavedFact) -> dict[str, Any]:
    """All fields of a fact; of a kind unknown here, or damaged, what is there."""
    head = {"task": saved.task, "run": saved.run, "kind": saved.kind, "at_ms": saved.at_ms}
    try:
        body = json.loads(saved.body)
        return head | fact_to_json(finite(fact_from_json(saved.kind, body | head))) | _unknown(body)
    except (KeyError, TypeError, ValueError, RecursionError):
        return head | {"body": saved.body}


def _unknown(body: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in body.items() if name not in _FIELDS}


_FIELDS = {f.name for cls in get_args(Fact) for f in fields(cls)}


def _columns() -> list[str]:
    """Columns of the table: what names a fact, then every field of every kind, parts as part.field."""
    parts: dict[str, Callable[[], Iterable[Any]]] = {"usage": lambda: fields(Usage), "timing": lambda: fields(Timing)}
    names = list(_FIRST)
    for cls in get_args(Fact):
        for f in fields(cls):
            names += [f"{f.name}.{part.name}" for part in parts[f.name]()] if f.name in parts else [f.name]
    return list(dict.fromkeys(names))


def _csv(facts: Iterable[SavedFact]) -> Iterator[str]:
    columns = _columns()
    text = StringIO()
    table = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    table.writeheader()
    for fact in facts:
        table.writerow(_flat(_in_full(fact)))
        yield text.getvalue()
        text.seek(0)
        text.truncate()
    yield text.getvalue()


def _flat(body: dict[str, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, value in body.items():
        if name in ("usage", "timing") and isinstance(value, dict):
            cells |= {f"{name}.{part}": number for part, number in value.items()}
        elif isinstance(value, dict | list):
            cells[name] = json.dumps(value)
        elif isinstance(value, str):
            cells[name] = _harmless(value)
        else:
            cells[name] = value
    return cells


def _harmless(text: str) -> str:
    shown = text.replace("\0", "\\x00")
    return f"'{shown}" if shown.startswith(_FORMULA) else shown
