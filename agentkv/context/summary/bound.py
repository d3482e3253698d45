"""Which items of a summary stay when not all of them fit.

The rule, first to go: plain facts (no number, no path), oldest first; facts with a number or a path, oldest first, but
the first eight; errors, oldest first, but the last three; files, longest untouched first, but the last twenty; the
last errors; the first eight facts (what the task began with); then decisions, files and open items, oldest first. The
goal goes last, and is cut before it goes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

FIRST_FACTS = 8
LAST_ERRORS = 3
LAST_FILES = 20
_HARD = re.compile(r"\d|\w[/\\]\w|\.\w{1,4}\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One line of a summary: the section it is in, its place there, and its text."""

    section: str
    place: int
    text: str


def keep_order(items: Sequence[Item]) -> list[Item]:
    """`items`, those that are kept longest first."""
    sizes = {section: sum(item.section == section for item in items) for section in ("errors", "files")}
    hard = [item.place for item in items if item.section == "facts" and _HARD.search(item.text)]
    first = set(hard[:FIRST_FACTS])

    def rank(item: Item) -> tuple[int, int]:
        newest_first = -item.place
        if item.section == "facts":
            if item.place in first:
                return 4, item.place
            return (8 if _HARD.search(item.text) else 9), newest_first
        if item.section == "errors":
            return (5 if item.place >= sizes["errors"] - LAST_ERRORS else 7), newest_first
        if item.section == "files":
            return (2 if item.place >= sizes["files"] - LAST_FILES else 6), newest_first
        return {"goal": 0, "open_items": 1, "decisions": 3}[item.section], newest_first

    return sorted(items, key=rank)
