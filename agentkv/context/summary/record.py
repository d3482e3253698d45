"""Summary: what is known of folded turns, in six sections.

Covers its text, merging an older one with a newer one, and keeping it small. Reading an answer of a model is
`parse.py`, writing one without a model is `extract.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from agentkv.context.summary.bound import Item, keep_order
from agentkv.context.summary.parse import Sections, clean, parse_sections, says_nothing

ITEM_CHARS = 300
"""A longer item is cut: a summary holds facts, not files."""
GOAL_CHARS = 800
_DONE = ("done:", "done -", "[x]", "completed:", "resolved:")
_SAME_CHARS = 8  # a done item closes an open one that contains it, if it is not a mere word
_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is known of the turns that were folded. Items are single lines, oldest first."""

    goal: str = ""
    decisions: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    open_items: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """True if there is anything in it."""
        return bool(self.goal or self.decisions or self.facts or self.files or self.errors or self.open_items)

    @classmethod
    def of(cls, sections: Sections) -> Summary:
        """A Summary of cleaned, distinct items from lists by section name."""
        return cls(
            goal=clean(" ".join(line for line in sections.get("goal", ()) if not says_nothing(line)), GOAL_CHARS),
            decisions=_distinct(sections.get("decisions", ())),
            facts=_distinct(sections.get("facts", ())),
            files=_distinct(sections.get("files", ())),
            errors=_distinct(sections.get("errors", ())),
            open_items=_distinct(sections.get("open_items", ())),
        )

    @classmethod
    def parse(cls, text: str, *, own: bool = False) -> Summary | None:
        """The Summary that `text` holds: our own form, Markdown headings or a JSON object; None for anything else.

        `parse(summary.text(), own=True)` is the summary again. A model's text that only reports errors is none.
        """
        sections = parse_sections(text, own=own)
        found = None if sections is None else cls.of(sections)
        return found or None

    def text(self) -> str:
        """The sections that are not empty, one item a line; the same bytes for the same summary."""
        rows = [f"Goal: {clean(self.goal, GOAL_CHARS)}"] if self.goal else []
        for title, items in self._titled():
            if items:
                rows.append(f"{title}:")
                rows.extend(f"- {clean(item, ITEM_CHARS)}" for item in items)
        return "\n".join(rows)

    def merged(self, newer: Summary) -> Summary:
        """This summary carried on by a newer one: nothing is lost but open items that `newer` calls done.

        The newer goal counts if there is one. An item said again keeps its place, a file touched again moves to the
        end. "done: X" among the newer open items closes X.
        """
        done = [_without_mark(item) for item in newer.open_items if _is_done(item)]
        still = (item for item in (*self.open_items, *newer.open_items) if not _is_done(item))
        return Summary(
            goal=newer.goal or self.goal,
            decisions=_distinct((*self.decisions, *newer.decisions)),
            facts=_distinct((*self.facts, *newer.facts)),
            files=tuple(reversed(_distinct(reversed((*self.files, *newer.files))))),
            errors=_distinct((*self.errors, *newer.errors)),
            open_items=_distinct(item for item in still if not any(_closes(end, item) for end in done)),
        )

    def filled(self, other: Summary) -> Summary:
        """This summary with the sections that are empty taken from `other`."""
        return Summary(
            goal=self.goal or other.goal,
            decisions=self.decisions or other.decisions,
            facts=self.facts or other.facts,
            files=self.files or other.files,
            errors=self.errors or other.errors,
            open_items=self.open_items or other.open_items,
        )

    def bounded(self, max_tokens: int, count: Callable[[str], int]) -> Summary:
        """As much as fits into `max_tokens`, by the rule of `bound.keep_order`; itself if all of it fits."""
        size = count(self.text())
        if size <= max_tokens:
            return self
        items = [Item(section="goal", place=0, text=self.goal)] if self.goal else []
        for section in ("decisions", "facts", "files", "errors", "open_items"):
            texts: tuple[str, ...] = getattr(self, section)
            items += [Item(section=section, place=place, text=text) for place, text in enumerate(texts)]
        order = keep_order(items)
        room = len(self.text())
        smaller = self
        for _ in range(_ROUNDS):
            room = int(room * max_tokens / max(size, 1) * 0.98)
            smaller = _of_items(order, room)
            size = count(smaller.text())
            if size <= max_tokens:
                return smaller
        return Summary()

    def _titled(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        return (
            ("Decisions", self.decisions),
            ("Facts", self.facts),
            ("Files", self.files),
            ("Errors", self.errors),
            ("Open items", self.open_items),
        )


def _of_items(order: list[Item], room_chars: int) -> Summary:
    """The first items of `order` that fit into `room_chars`, each back in its place; a goal too long is cut."""
    kept: list[Item] = []
    for item in order:
        cost = len(item.text) + 3
        if cost > room_chars:
            if item.section == "goal" and room_chars > _SAME_CHARS:
                kept.append(Item(section="goal", place=0, text=clean(item.text, room_chars)))
            break
        room_chars -= cost
        kept.append(item)
    kept.sort(key=lambda item: item.place)
    sections: Sections = {}
    for item in kept:
        sections.setdefault(item.section, []).append(item.text)
    return Summary.of(sections)


def _distinct(items: Iterable[str]) -> tuple[str, ...]:
    found: dict[str, str] = {}
    for item in items:
        line = clean(item, ITEM_CHARS)
        if not says_nothing(line):
            found.setdefault(line.casefold(), line)
    return tuple(found.values())


def _is_done(item: str) -> bool:
    return item.casefold().startswith(_DONE)


def _without_mark(item: str) -> str:
    low = item.casefold()
    return next(low[len(mark) :] for mark in _DONE if low.startswith(mark)).strip(" .:-")


def _closes(done: str, item: str) -> bool:
    opened = item.casefold().strip(" .:-")
    shorter, longer = sorted((done, opened), key=len)
    return done == opened or (len(shorter) >= _SAME_CHARS and shorter in longer)
