"""HostedWaits: how long a session's next call is off, as its own past calls tell, and which mark that is worth.

Covers learning gaps between calls (behind a tool, behind a person) and the choice of a mark and of keep-alives by
`policy.hosted`. No I/O and no clock: times are given. Does not cover requests (`anthropic_hosted.py`, `openai_hosted.py`).
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Literal

from agentkv.core.forecast import Forecast
from agentkv.core.hint import ToolStatus
from agentkv.hints.forecaster import Forecaster
from agentkv.policy.hosted import CachePrices, KeepAlive, Mark, MarkChoice, choose_mark, keep_alive

Kind = Literal["tool", "person"]
MOST_SESSIONS = 4096
CALLS_LEFT = 10.0
"""A session is expected to make as many calls as it has made, and at least these."""
USUAL = 10.0
"""The share of people's waits in a session is drawn to everybody's as by this many waits."""

_FIRST_GROWTH = 1500.0
_MOST_GROWN = 2000


@dataclass(slots=True)
class _Known:
    """A session's last call: when, how large, under which mark its prefix lives and since when; its waits so far.

    `keepable`: whether it can be read once more without an answer. `refused`: that was tried, and the provider would not.
    """

    at_s: float = 0.0
    tokens: int = 0
    calls: int = 0
    mark: Mark = "none"
    alive_until_s: float = 0.0
    keepable: bool = True
    refused: bool = False
    kinds: Counter[str] = field(default_factory=Counter)


class HostedWaits:
    """Thread-safe. `keeps`: keep-alives are sent where they pay, so that a choice may count on them."""

    def __init__(self, prices: CachePrices, *, keeps: bool = False) -> None:
        self.prices = prices
        self.keeps = keeps
        self._lock = threading.Lock()
        self._forecaster = Forecaster()
        self._kinds = Counter({"tool": 8, "person": 2})
        self._growth, self._grown = _FIRST_GROWTH, 1
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def learn(self, session: str, kind: Kind, gap_s: float) -> None:
        """The session's next call came after `gap_s`."""
        with self._lock:
            self._learn(session, self._of(session), kind, gap_s)

    def choose(self, session: str, *, live_tokens: int, new_tokens: int) -> MarkChoice:
        """The mark for a call of which so many tokens are cached."""
        with self._lock:
            return self._choose(session, self._of(session), live_tokens, new_tokens)

    def call(self, session: str, kind: Kind, *, tokens: int, now_s: float, keepable: bool = True) -> MarkChoice:
        """A call of `tokens` follows a tool or a person: what came before is learnt, and its mark is chosen.

        `keepable`: whether it could be sent once more without an answer.
        """
        with self._lock:
            known = self._of(session)
            known.keepable = keepable and not known.refused
            live = 0
            if known.at_s:
                self._learn(session, known, kind, max(0.0, now_s - known.at_s))
                live = min(known.tokens, tokens) if now_s <= known.alive_until_s else 0
            choice = self._choose(session, known, live, tokens - live)
            if known.at_s and tokens >= known.tokens:
                self._grown = min(self._grown + 1, _MOST_GROWN)
                self._growth += (tokens - known.tokens - self._growth) / self._grown
            known.at_s, known.tokens, known.mark, known.calls = now_s, tokens, choice.mark, known.calls + 1
            known.alive_until_s = now_s + self.prices.lasts_s(choice.mark)
            return choice

    def expires_s(self, session: str) -> float | None:
        """When the session's prefix expires; None where none is kept, or none can be read once more."""
        with self._lock:
            known = self._known.get(session)
            return None if known is None or known.mark == "none" or not known.keepable else known.alive_until_s

    def keep(self, session: str, *, now_s: float, forecast: Forecast | None = None) -> KeepAlive:
        """What to do just before the prefix expires: by the running tool's `forecast` (from now on), else as for a person."""
        with self._lock:
            known = self._known.get(session)
            if known is None:
                return "none"
            if forecast is None:
                whole = self._forecaster.forecast("person", "", session=session)
                elapsed_s = max(0.0, now_s - known.at_s)
            else:
                whole, elapsed_s = forecast, 0.0
            return keep_alive(whole, self.prices, known.mark, elapsed_s=elapsed_s)

    def kept(self, session: str, *, now_s: float) -> None:
        """A keep-alive was sent: the prefix lives for its mark's time from now on."""
        with self._lock:
            known = self._known.get(session)
            if known is not None:
                known.alive_until_s = now_s + self.prices.lasts_s(known.mark)

    def keep_refused(self, session: str) -> None:
        """The provider did not take its keep-alive: there are none for this session any more."""
        with self._lock:
            known = self._known.get(session)
            if known is not None:
                known.keepable, known.refused = False, True

    def unmarked(self, session: str) -> None:
        """Its last call went without a mark after all."""
        with self._lock:
            known = self._known.get(session)
            if known is not None:
                known.mark, known.alive_until_s = "none", known.at_s

    def forget(self, session: str) -> None:
        """The session is over."""
        with self._lock:
            self._known.pop(session, None)

    def _learn(self, session: str, known: _Known, kind: Kind, gap_s: float) -> None:
        self._forecaster.learn(kind, "", gap_s, ToolStatus.SUCCEEDED, session=session)
        self._kinds[kind] += 1
        known.kinds[kind] += 1

    def _choose(self, session: str, known: _Known, live_tokens: int, new_tokens: int) -> MarkChoice:
        usual = self._kinds["person"] / self._kinds.total()
        person = (known.kinds["person"] + USUAL * usual) / (known.kinds.total() + USUAL)
        waits = [
            (weight, self._forecaster.forecast(kind, "", session=session))
            for kind, weight in (("tool", 1.0 - person), ("person", person))
        ]
        return choose_mark(
            waits, self.prices, live_tokens=live_tokens, new_tokens=new_tokens, live_mark=known.mark,
            keeps=self.keeps and known.keepable, growth_tokens=self._growth, calls_left=max(CALLS_LEFT, known.calls),
        )  # fmt: skip

    def _of(self, session: str) -> _Known:
        known = self._known.setdefault(session, _Known())
        self._known.move_to_end(session)
        while len(self._known) > MOST_SESSIONS:
            self._known.popitem(last=False)
        return known
