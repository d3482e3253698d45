"""Check: the prompts of many sessions, watched call by call, and what came of it in one figure.

Covers recorded calls and calls as they happen. Does not cover reading records (`bodies.py`) nor printing
(`cli/prefix_check.py`).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from agentkv.context.breaks import Cause
from agentkv.context.explain import Explanation, Seen
from agentkv.context.prefix import PrefixWatch

MAX_PROMPTS = 16
"""Prompts of one session that are watched side by side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """One call: whose it was, and how it stands to the call before."""

    session: str
    told: Explanation


class Check:
    """Feed calls in their order; sessions may be mixed. Not thread-safe.

    `count(text, model)` counts tokens. Prompts of one session whose first messages have little in common (those of
    several nodes) are watched each for itself. A call without a session belongs to the one with the same first user
    message, however its system prompt changed.
    """

    def __init__(
        self, *, count: Callable[[str, str | None], int], lifetime_s: float | None = None, min_tokens: int = 0
    ) -> None:
        self.calls = 0
        self.sessions = 0
        """Prompts that were begun; the first call of each can neither extend nor break."""
        self.extending = 0
        """Calls whose prompt extends the one before in its session."""
        self._count = count
        self._lifetime_s = lifetime_s
        self._min_tokens = min_tokens
        self._watches: dict[tuple[str, str], list[PrefixWatch]] = {}
        self._all: list[PrefixWatch] = []

    @property
    def breaks(self) -> int:
        """Calls whose prompt does not extend the one before, declared folds not counted."""
        return sum(watch.breaks for watch in self._all)

    @property
    def lost_tokens(self) -> int:
        """Tokens computed again because of breaks."""
        return sum(watch.lost_tokens for watch in self._all)

    @property
    def causes(self) -> Counter[Cause]:
        """How often each cause was seen, the provider's own too."""
        return sum((watch.causes for watch in self._all), Counter())

    @property
    def append_share(self) -> float:
        """Of the calls that had one before them, the share that extends it; 1.0 where there is none."""
        later = self.calls - self.sessions
        return self.extending / later if later else 1.0

    def feed(self, call: Seen) -> Checked:
        """The next call."""
        watch = self._watch(call)
        if call.declared is not None:
            watch.expect_break(call.declared)
        watch.see(
            call.messages, call.tools, model=call.model, template=call.template, usage=call.usage, at_s=call.at_s,
            answer=call.answer,
        )  # fmt: skip
        told = watch.explain()[-1]
        self.calls += 1
        self.extending += told.call > 1 and told.extends
        return Checked(session=watch.session, told=told)

    def _watch(self, call: Seen) -> PrefixWatch:
        """The watch of the prompt that this call goes on with; the one that was used last, where several could be."""
        asked = next((message.content for message in call.messages if message.role == "user"), "")
        watches = self._watches.setdefault(("named", call.session) if call.session else ("asked", asked), [])
        for place in reversed(range(len(watches))):
            if not call.session or call.declared or not watches[place].is_another_prompt(call.messages):
                watches.append(watches.pop(place))
                return watches[-1]
        self.sessions += 1
        watch = PrefixWatch(
            call.session or f"#{self.sessions}", count=functools.partial(self._counted, call.model),
            lifetime_s=self._lifetime_s, min_tokens=self._min_tokens, warn=False,
        )  # fmt: skip
        self._all.append(watch)
        watches.append(watch)
        del watches[:-MAX_PROMPTS]
        return watch

    def _counted(self, model: str, text: str) -> int:
        return self._count(text, model or None)
