"""Which items of a summary stay when not all of them fit.

The rule, from what is kept longest: the goal; then, one of each section in turn, its ends (the three oldest and three
newest open items, decisions and files, the eight oldest and four newest facts with a number or a path, the three newest
errors); then the rest, newest first: open items, decisions, files, facts with a number or a path, errors, and plain
facts, which are the first to go. So what the task began with outlives what happened in its middle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

ENDS = 3
FIRST_FACTS, LAST_FACTS = 8, 4
LAST_ERRORS = 3
_TURN = ("open_items", "decisions", "files", "facts", "errors")
_REST = ("open_items", "decisions", "files", "hard facts", "errors", "facts")
_HARD = re.compile(r"\d|\w[/\\]\w|\.\w{1,4}\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One line of a summary: the section it is in, its place there, and its text."""

    section: str
    place: int
    text: str


def keep_order(items: Sequence[Item]) -> list[Item]:
    """`items`, those that are kept longest first."""
    by_section: dict[str, list[Item]] = {}
    for item in items:
        by_section.setdefault(item.section, []).append(item)
    ends = {section: _ends(section, by_section.get(section, [])) for section in _TURN}
    order = list(by_section.get("goal", []))
    for number in range(max(map(len, ends.values()))):
        order += [ends[section][number] for section in _TURN if number < len(ends[section])]
    taken = {(item.section, item.place) for item in order}
    rest = [item for item in items if (item.section, item.place) not in taken]
    return order + sorted(rest, key=lambda item: (_REST.index(_kind(item)), -item.place))


def _ends(section: str, items: list[Item]) -> list[Item]:
    """The items that count most: from both ends in turn, of facts two old ones for a new one, of errors the newest."""
    if section == "facts":
        hard = [item for item in items if _kind(item) == "hard facts"]
        first, last = hard[:FIRST_FACTS], hard[FIRST_FACTS:][-LAST_FACTS:][::-1]
        pairs = [first[at : at + 2] + last[at // 2 : at // 2 + 1] for at in range(0, FIRST_FACTS, 2)]
        return [item for pair in pairs for item in pair]
    newest = items[::-1]
    if section == "errors":
        return newest[:LAST_ERRORS]
    both = [item for pair in zip(items, newest, strict=True) for item in pair]
    return list({item.place: item for item in both[: 2 * ENDS]}.values())


def _kind(item: Item) -> str:
    return "hard facts" if item.section == "facts" and _HARD.search(item.text) else item.section
