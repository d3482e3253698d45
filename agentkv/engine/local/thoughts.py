"""Thoughts: what a model writes between marks of its own before it answers.

Covers: the marks, which models have them, `ThoughtGate`. Does not cover: thoughts in channels (GPT-OSS) and those that a
tokenizer's own response template describes (`responses.py`); what a chat template makes of earlier thoughts (`chat.py`).

A thought stands at the beginning of an answer, if anywhere; with some templates the prompt has opened it already. Nothing
is looked for in it: no call, no stop text. What never ends is all thought. Line ends at its borders are nobody's text.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from agentkv.engine.local.toolcalls import Gate, Wanted, begun

_BLANKS = " \t\r\n"
_LINE_ENDS = "\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """How a thought begins and ends."""

    opening: str
    closing: str


MARKS = (Marks(opening="<think>", closing="</think>"), Marks(opening="[THINK]", closing="[/THINK]"))
SPELLED = frozenset(text for marks in MARKS for text in (marks.opening, marks.closing))


def marks_of(chat_template: str, words: Collection[str]) -> Marks | None:
    """The marks that the template reads or writes, or that are words of the tokenizer; None for a model without."""
    for marks in MARKS:
        if marks.closing in chat_template or (marks.opening in words and marks.closing in words):
            return marks
    return None


class ThoughtGate:
    """Passes what stands behind the thought on to `words`. `begun`: the prompt ends inside of it."""

    sees_control = True

    def __init__(self, words: Gate, marks: Marks, *, begun: bool = False) -> None:
        self._words = words
        self._marks = marks
        self.aside = words.aside
        self.waits = words.waits
        self.hides = words.hides
        self._state: Literal["before", "thought", "gap", "behind"] = "thought" if begun else "before"
        self._fresh = True  # nothing of the thought has been told
        self._held = ""

    @property
    def unfinished(self) -> list[Wanted]:
        """Calls behind the thought that were told in part."""
        return self._words.unfinished

    @property
    def thinks(self) -> bool:
        """True while the thought is written."""
        return self._state == "thought"

    @property
    def inside(self) -> bool:
        """True where no stop text is looked for: in the thought and between it and the answer."""
        return self._state in {"thought", "gap"} or self._words.inside

    def feed(self, text: str) -> str:
        """The part that may be shown now."""
        self._held += text
        if self._state == "before":
            self._before()
        if self._state == "thought":
            self._thought()
        if self._state == "gap":
            self._gap()
        if self._state != "behind" or not self._held:
            return ""
        text, self._held = self._held, ""
        return self._words.feed(text)

    def control(self, text: str) -> str:
        """A mark, in tokenizers where it is a control token; any other is no part of a thought."""
        if self._state == "thought":
            if text == self._marks.closing:
                self._think(self._held.rstrip(_LINE_ENDS))
                self._hide(self._held)
                self._held, self._state = "", "gap"
            return ""
        if self._state == "before" and text == self._marks.opening:
            self._hide(self._held)
            self._held, self._state = "", "thought"
            return ""
        if not self._words.sees_control:
            return ""
        return self._rest() + self._words.control(text)

    def finish(self, *, cut: bool) -> tuple[str, list[Wanted]]:
        """The rest that may be shown, and the calls."""
        if self._state == "thought":
            self._think(self._held.rstrip(_LINE_ENDS))
            self._hide(self._held)
            self._held = ""
        shown = self._rest()
        rest, calls = self._words.finish(cut=cut)
        return shown + rest, calls

    def _rest(self) -> str:
        """What was held and is no thought."""
        text, self._held, self._state = self._held, "", "behind"
        return self._words.feed(text) if text else ""

    def _before(self) -> None:
        text = self._held.lstrip(_BLANKS)
        if text.startswith(self._marks.opening):
            rest = text[len(self._marks.opening) :]
            self._hide(self._held[: len(self._held) - len(rest)])
            self._held, self._state = rest, "thought"
        elif not self._marks.opening.startswith(text):
            self._state = "behind"

    def _thought(self) -> None:
        marks, text = self._marks, self._held
        if self._fresh:
            text = text.lstrip(_LINE_ENDS)
            if text.startswith(marks.opening):  # some write again what the prompt has written
                text = text[len(marks.opening) :].lstrip(_LINE_ENDS)
            elif marks.opening.startswith(text):
                return
        at = text.find(marks.closing)
        end = len(text) - begun(text, marks.closing) if at < 0 else at
        told = text[:end].rstrip(_LINE_ENDS)
        self._think(told)
        if at < 0:
            self._hide(self._held[: len(self._held) - len(text) + len(told)])
            self._held = text[len(told) :]
        else:
            rest = text[at + len(marks.closing) :]
            self._hide(self._held[: len(self._held) - len(rest)])
            self._held, self._state = rest, "gap"

    def _gap(self) -> None:
        text = self._held.lstrip(_LINE_ENDS)
        self._hide(self._held[: len(self._held) - len(text)])
        self._held = text
        if text:
            self._state = "behind"

    def _think(self, text: str) -> None:
        text = text.lstrip(_LINE_ENDS) if self._fresh else text
        if text:
            self._fresh = False
            self.aside.think(text)

    def _hide(self, text: str) -> None:
        self.aside.hidden_bytes += len(text.encode())
