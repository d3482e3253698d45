"""Forecaster: how long a tool call will take, learnt from the calls that ended and from those that did not.

Discrete-time hazards on the grid of `core/curve.py`. A call has a chain of keys from broad to narrow (`keys.py`) and
one within its session; each is shrunk towards the one before, and forgets exponentially. Holds names of tools and
command words, never arguments. Does not cover the counting (`hazards.py`), classes and priors (`classes.py`), nor
where the state is kept between runs (`runtime/learned.py`).
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import TYPE_CHECKING, Any, Self

from agentkv.core.curve import BINS, LEVELS, MAX_WAIT_S, Curve, bin_of
from agentkv.core.forecast import Forecast
from agentkv.core.hint import ToolStatus
from agentkv.hints.classes import prior_of
from agentkv.hints.keys import Chain, Key, Told, chain_of, key_from_json, name_of, size_of
from agentkv.log import count, failed

if TYPE_CHECKING:
    from agentkv.hints.hazards import Counts, Hazards, Table

KAPPA = 4.0
"""For how many calls a broader key counts in a narrower one."""
SESSION_KAPPA = 3.0
"""The same for what this session has seen so far."""
KEEP = 0.985
"""What a call counts for after one more of its key."""
BROAD_KEEP = 0.999
"""The same for classes and for everything."""
SESSION_KEEP = 0.93
"""The same within a session."""
MAX_KEYS = 4096
"""Keys kept; the one that was learnt least recently leaves first (models invent commands)."""
MAX_SESSION_KEYS = 1024
MAX_FRESH = 10_000
"""Calls kept for the next save; more than that between two saves, and the oldest are not in the file."""
MAX_RUNNING = 1024
VERSION = "agentkv.forecaster/2"

DECLARED_SPREAD = (0.5, 0.75, 1.0, 1.5, 2.0)
"""A declared time is believed within a factor of two."""
PROGRESS_SPREAD = (0.7, 0.85, 1.0, 1.2, 1.5)


class Forecaster:
    """Learns durations and forecasts waits. Thread-safe; a forecast or a call learnt costs some 15 us."""

    def __init__(self, *, kappa: float = KAPPA, session_kappa: float = SESSION_KAPPA, forgets: bool = True) -> None:
        from agentkv.hints import hazards  # it brings numpy, which `import agentkv` must not pay

        self._hazards = hazards
        self._kappa = hazards.as_hazards([kappa] * BINS)
        self._session_kappa = hazards.as_hazards([session_kappa] * BINS)
        self._keep, self._broad_keep, self._session_keep = (
            hazards.as_factor(keep if forgets else 1.0) for keep in (KEEP, BROAD_KEEP, SESSION_KEEP)
        )
        self._keys: OrderedDict[Key, Counts] = OrderedDict()
        self._session_keys: OrderedDict[Key, Counts] = OrderedDict()
        self._running: OrderedDict[str, int] = OrderedDict()
        self._fresh: deque[Told] = deque(maxlen=MAX_FRESH)
        self._priors: dict[str, Hazards] = {}
        self._shrinker = hazards.Shrinker() if kappa > 0 and session_kappa > 0 else None
        self._lock = threading.Lock()

    # -- learning

    def learn(
        self,
        tool: str,
        command: str,
        duration_s: float,
        status: ToolStatus = ToolStatus.SUCCEEDED,
        *,
        session: str = "",
        arg_bytes: int = 0,
        duration_key: str = "",
        call_id: str = "",
    ) -> None:
        """A call of `tool` stands at `status` after `duration_s`.

        SUCCEEDED and FAILED ended the wait. CANCELLED and PAUSED (and a time-out: say CANCELLED) did not: the call
        would have run longer, and counts as survived up to then. RUNNING says that it runs still, which needs a
        `call_id`; it may be said again and again, and the end with the same `call_id` adds what is new. A duration
        that is no number, negative or infinite is ignored and counted. The other arguments are `forecast`'s.
        """
        seconds = _seconds(duration_s)
        if seconds is None:
            count("forecast_bad_duration")
            return
        runs = status is ToolStatus.RUNNING
        if runs and not call_id:
            return
        ended = status is ToolStatus.SUCCEEDED or status is ToolStatus.FAILED
        with self._lock:
            first = self._running.pop(call_id, 0) if call_id else 0
            last = max(bin_of(seconds), first)
            if runs and last > 0:
                self._running[call_id] = last
                if len(self._running) > MAX_RUNNING:
                    self._running.popitem(last=False)
            if ended or last > first:
                command = name_of(duration_key or command)
                self._tell(Told(name_of(tool), command, size_of(arg_bytes), first, last, ended), session)

    def never(self, tool: str, command: str = "", *, session: str = "") -> None:
        """A wait that will not end (its session was given up meanwhile). Counts for the mass at infinity."""
        with self._lock:
            self._tell(Told(name_of(tool), name_of(command), 0, 0, BINS, ended=False), session)

    def _tell(self, told: Told, session: str) -> None:
        self._fresh.append(told)
        step = self._count(told)
        if session:
            counts = self._counts(self._session_keys, (session, told.tool, told.command), MAX_SESSION_KEYS)
            counts.learn(step, None if told.first else self._session_keep)

    def _count(self, told: Told) -> Table:
        step = self._hazards.step_of(told.first, told.last, ended=told.ended)
        chain = chain_of(told.tool, told.command, told.size)
        broad, keeps = chain.broad, (None, None) if told.first else (self._broad_keep, self._keep)
        for index, key in enumerate(chain.keys):
            self._counts(self._keys, key, MAX_KEYS).learn(step, keeps[index >= broad])
        return step

    def _counts(self, keys: OrderedDict[Key, Counts], key: Key, limit: int) -> Counts:
        counts = keys.get(key)
        if counts is not None:
            keys.move_to_end(key)
            return counts
        counts = keys[key] = self._hazards.Counts()
        if len(keys) > limit:
            keys.popitem(last=False)
        return counts

    # -- forecasting

    def forecast(
        self,
        tool: str,
        command: str = "",
        expect_s: float | None = None,
        *,
        session: str = "",
        arg_bytes: int = 0,
        timeout_s: float | None = None,
        duration_key: str = "",
    ) -> Forecast:
        """The wait for a call of `tool` that starts now; `n` calls of the narrowest name that was seen stand behind it.

        `command`: the first command word, and a sub-command after a space. `session`: calls of the same session weigh
        most. `arg_bytes`: the size of the arguments, 0 = not known. `timeout_s`: the call is ended by then.
        `duration_key`: the user's own word for what decides the duration, in place of the command. `expect_s`
        (declared by the caller, who knows this very call) makes half of the distribution, what is known of the tool
        the other half; numbers that are no durations are ignored and counted.
        """
        declared = None if expect_s is None else _seconds(expect_s)
        if expect_s is not None and declared is None:
            count("forecast_bad_expect")
        end_s = None if timeout_s is None else _seconds(timeout_s)
        if timeout_s is not None and not end_s:
            count("forecast_bad_timeout")
            end_s = None
        tool, command = name_of(tool), name_of(duration_key or command)
        chain = chain_of(tool, command, size_of(arg_bytes))
        with self._lock:
            n, is_own, seen = self._seen(chain, (session, tool, command))
            if declared is not None and not is_own and end_s is None:
                points = tuple(min(declared * factor, MAX_WAIT_S) for factor in DECLARED_SPREAD)
                return Forecast(remaining_s=points, n=0, source="declared")
            survival = self._survival(self._prior(chain.label), seen)
        if declared is not None:
            believed = self._hazards.declared_survival(declared)
            survival = 0.5 * (survival + believed) if is_own else believed
            n = n if is_own else 0
        return Forecast(
            remaining_s=self._hazards.points_of(survival, MAX_WAIT_S if end_s is None else end_s),
            n=n,
            source="declared" if declared is not None else "history" if n else "prior",
            curve=Curve(survival=tuple(survival.tolist()), end_s=end_s),
        )

    def _seen(self, chain: Chain, session_key: Key) -> tuple[int, bool, list[tuple[Counts, Hazards]]]:
        """Of what was seen: calls of the narrowest name, whether the tool was, and the counts, broad to narrow."""
        n, is_own, seen = 0, False, []
        get = self._keys.get
        for index, key in enumerate(chain.keys):
            counts = get(key)
            if counts is not None:
                seen.append((counts, self._kappa))
                if key[0] != "size":
                    n, is_own = counts.calls, index >= chain.broad
        if session_key[0]:
            counts = self._session_keys.get(session_key)
            if counts is not None:
                seen.append((counts, self._session_kappa))
        return n, is_own, seen

    def _survival(self, prior: Hazards, seen: list[tuple[Counts, Hazards]]) -> Hazards:
        if self._shrinker is not None:
            return self._shrinker.survival(prior, seen)
        return self._hazards.survival_of(self._hazards.shrink(prior, seen))

    def _prior(self, label: str) -> Hazards:
        prior = self._priors.get(label)
        if prior is None:
            prior = self._priors[label] = self._hazards.as_hazards(prior_of(label))
        return prior

    # -- the state

    def merge(self, other: Forecaster) -> None:
        """Add what another forecaster learnt, none of it in common with this one."""
        theirs = other._copied()
        with self._lock:
            for key, counts in theirs:
                self._counts(self._keys, key, MAX_KEYS).add(counts)

    def to_json(self) -> dict[str, Any]:
        """What was learnt, as plain JSON; what is known of single sessions is left out."""
        return _state(self._copied())

    def drain(self) -> tuple[dict[str, Any], list[Told]]:
        """`to_json`, and the calls learnt since this was last asked, for a file that several processes share."""
        with self._lock:
            copied, fresh = self._copied_unlocked(), list(self._fresh)
            self._fresh.clear()
        return _state(copied) if fresh else {}, fresh

    def undrain(self, fresh: Iterable[Told]) -> None:
        """Keep these for the next `drain`: they did not reach the file."""
        with self._lock:
            kept = [*fresh, *self._fresh]
            self._fresh = deque(kept, maxlen=MAX_FRESH)

    def replay(self, calls: Iterable[Told]) -> None:
        """Learn what another forecaster's `drain` gave; the sessions are unknown by then."""
        with self._lock:
            for told in calls:
                self._count(told)

    def adopt(self, other: Forecaster) -> None:
        """Go on with what `other` knows (this one's drained calls among it), the sessions, and what came since."""
        theirs = other._copied()
        with self._lock:
            self._keys = OrderedDict(theirs)
            for told in self._fresh:
                self._count(told)

    def _copied(self) -> list[tuple[Key, Counts]]:
        with self._lock:
            return self._copied_unlocked()

    def _copied_unlocked(self) -> list[tuple[Key, Counts]]:
        return [(key, counts.copy()) for key, counts in self._keys.items()]

    @classmethod
    def from_json(cls, state: Any) -> Self:
        """The forecaster that `to_json` described. What cannot be read is left out and counted: never an error."""
        forecaster = cls()
        if not is_state(state):
            failed("forecast_state_unreadable", expected=VERSION)
            return forecaster
        for row in state["keys"]:
            try:
                key = key_from_json(row[0])
                counts = forecaster._hazards.Counts.from_row(row[1:])
            except (ValueError, TypeError, LookupError):
                count("forecast_state_bad_row")
                continue
            forecaster._counts(forecaster._keys, key, MAX_KEYS).add(counts)
        return forecaster


def _state(keys: Iterable[tuple[Key, Counts]]) -> dict[str, Any]:
    return {"v": VERSION, "keys": [[list(key), *counts.row()] for key, counts in keys]}


def is_state(state: Any) -> bool:
    """Whether this has the outer form of what `Forecaster.to_json` gives."""
    return isinstance(state, Mapping) and state.get("v") == VERSION and isinstance(state.get("keys"), list)


def progress_forecast(elapsed_s: float, progress: float, known: Forecast | None = None) -> Forecast | None:
    """The whole duration (from the start) of a call that did `progress` (0..1] of its work in `elapsed_s`.

    `known` is what its start was forecast with. Where calls of the tool stand behind that, the report makes half of
    the distribution at first and all of it at the end (`(1 + progress) / 2`), what is known of the tool, given that this
    call still runs, the rest: early reports come from work that is not even (one says 2 % after its set-up), late ones
    hardly err. None where the report says nothing: not a number, <= 0, or no time has passed. Like every
    forecast at the start of a wait it is to be conditioned with `.after(elapsed_s)`.
    """
    share, elapsed = _seconds(progress), _seconds(elapsed_s)
    if not share or not elapsed:
        return None
    share = min(share, 1.0)
    rest_s = elapsed / share - elapsed
    reported = tuple(min(elapsed + rest_s * factor, MAX_WAIT_S) for factor in PROGRESS_SPREAD)
    if known is None or known.n == 0:
        return Forecast(remaining_s=reported, n=0, source="declared")
    left = known.after(elapsed)
    others = tuple(min(elapsed + left.quantile_s(level), MAX_WAIT_S) for level in LEVELS)
    points = _mixed(reported, others, (1 + share) / 2)
    return Forecast(remaining_s=points, n=known.n, source="declared")


def _mixed(some: tuple[float, ...], others: tuple[float, ...], share: float) -> tuple[float, ...]:
    """Equally likely points of a mixture of two sets of such points, `some` with the weight `share`."""
    weighted = sorted([(x, share / len(some)) for x in some] + [(x, (1 - share) / len(others)) for x in others])
    points, passed, place = [], weighted[0][1], 0
    for level in LEVELS:
        while passed < level and place < len(weighted) - 1:
            place += 1
            passed += weighted[place][1]
        points.append(weighted[place][0])
    return tuple(points)


def _seconds(value: object) -> float | None:
    """`value` as seconds in [0, MAX_WAIT_S]; None for what is no duration."""
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, Real):
            return None
        try:
            value = float(value)
        except OverflowError:
            return None
    return min(value, MAX_WAIT_S) if 0 <= value < math.inf else None  # NaN compares false
