"""SlotWork: slot actions on threads of their own, so that one that hangs keeps nobody but its own session.

Covers carrying steps out in order, what became of each, learning again of a slot whose action was never answered (the
server is asked until it says that the slot is idle, then the slot is erased before anybody uses it), and slots of calls
whose end nobody told: the server is asked whether it computes them. Does not cover which
steps (`slots.py`), nor when (`llamacpp.py`). A slot moves in one piece of work at a time, so threads are as few as slots.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from agentkv import log
from agentkv.adapters.base import Outcome, Unreachable
from agentkv.adapters.http import Endpoint
from agentkv.adapters.slots import Claim, Fate, SlotPool, Step
from agentkv.clock import Clock

FIRST_LOOK_S = 1.0
MOST_LOOK_S = 30.0
LOOK_WITHIN_S = 10.0
"""A server that computes a long batch answers late; nobody waits for this but the slot itself."""
LEAK_S = 30.0
"""A call that has its slot for so long, while others want one, may have been given up by a client that told nobody."""
LEAK_LOOK_S = 5.0
"""Between two looks at it: a client that tries again is idle in between, too."""

_NO_ANSWER = (None, 200, 502, 503, 504)
"""Nothing came, or not the server's own words: what became of the slot is not known."""

Note = Callable[[Step, Outcome, str, float], None]


class Work:
    """Steps under way. `lost`, `outcome` and `words` hold once `over` is set."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        self.over = threading.Event()
        self.lost: Step | None = None
        self.outcome = Outcome.ADVISORY
        self.unsaved: set[int] = set()
        self.words: list[str] = []

    @property
    def refused(self) -> bool:
        """Whether it failed by the server's own word: a full disk is a 500 there."""
        return self.outcome is Outcome.FAILED and self.lost is None

    @property
    def told(self) -> str:
        """What it is, for people."""
        return ", ".join(f"{step.deed} slot {step.slot}" for step in self.steps)


class SlotWork:
    """One server's actions. `turn` guards the pool; `act(step)` asks the server, and raises Unreachable; `note` hears of each step."""

    def __init__(
        self, server: Endpoint, turn: threading.Condition, *, act: Callable[[Step], None], note: Note, clock: Clock
    ) -> None:
        self._server = server
        self._turn = turn
        self._act = act
        self._note = note
        self._clock = clock
        self._under_way: set[Work] = set()
        self._pauses: dict[int, float] = {}
        self._looks = False
        self._ended = threading.Event()

    @property
    def under_way(self) -> bool:
        """Whether anything has begun and is not over. With `turn` held."""
        return bool(self._under_way)

    def begin(self, pool: SlotPool, steps: Sequence[Step]) -> Work:
        """Carry these out from now on. With `turn` held."""
        work = Work(steps)
        pool.begin(steps)
        self._under_way.add(work)
        threading.Thread(target=self._run, args=(pool, work), name="agentkv-slot", daemon=True).start()
        return work

    def look_for_leaks(self, pool: SlotPool) -> None:
        """Somebody wants a slot: those that calls have had for very long are given back if the server computes nothing there.

        With `turn` held; the asking is a thread's own.
        """
        claims = pool.overdue(self._clock.now_s() - LEAK_S)
        if claims and not self._looks and not self._ended.is_set():
            self._looks = True
            threading.Thread(target=self._look, args=(pool, claims), name="agentkv-slot-look", daemon=True).start()

    def close(self, within_s: float) -> None:
        """Let what is under way come to its end, in so long together; nothing is asked for after that. Idempotent."""
        with self._turn:
            works = list(self._under_way)
        ends_s = self._clock.now_s() + within_s
        for work in works:
            work.over.wait(max(0.0, ends_s - self._clock.now_s()))
        self._ended.set()

    # -- on a thread of the work's own

    def _run(self, pool: SlotPool, work: Work) -> None:
        fates = [(step, self._fate(step, work)) for step in work.steps]
        with self._turn:
            following = pool.settle(fates)
            self._under_way.discard(work)
            if following:
                self.begin(pool, following)
            work.over.set()
            self._turn.notify_all()
        if work.lost is not None:
            self._learn(pool, work.lost.slot)

    def _fate(self, step: Step, work: Work) -> Fate:
        """Ask for one step; after one that was not answered the rest would only hang as well. What could not be saved stays."""
        began_s = self._clock.now_s()
        keeps = step.deed == "erase" and step.slot in work.unsaved
        if work.lost is not None or keeps or self._ended.is_set():
            fate, outcome, detail = Fate.SKIPPED, Outcome.FAILED, "not tried"
        else:
            try:
                self._act(step)
                fate, outcome, detail = Fate.DONE, Outcome.APPLIED, ""
                self._pauses.pop(step.slot, None)
            except Unreachable as error:
                fate = Fate.LOST if error.status in _NO_ANSWER else Fate.REFUSED
                outcome, detail = Outcome.FAILED, str(error)
                if step.deed == "save":
                    work.unsaved.add(step.slot)
            except Exception as error:
                log.failed("slot_action_failed", error=repr(error))
                fate, outcome, detail = Fate.LOST, Outcome.FAILED, type(error).__name__
        if fate is Fate.LOST:
            work.lost = step
        words = f"{step.deed} slot {step.slot}" + (f": {detail}" if detail else "")
        work.words.append(words)
        work.outcome = Outcome.FAILED if Outcome.FAILED in (work.outcome, outcome) else outcome
        self._note(step, outcome, words, self._clock.now_s() - began_s)
        return fate

    def _learn(self, pool: SlotPool, slot: int) -> None:
        """Ask, later and later, until the server says that the slot is idle; then erase it, and it is anybody's."""
        while pool.is_unknown(slot):  # else the server was restarted without it
            pause_s = self._pauses.get(slot, FIRST_LOOK_S)
            self._pauses[slot] = min(2 * pause_s, MOST_LOOK_S)
            if self._ended.wait(pause_s):
                return
            try:
                slots = self._server.get("/slots", LOOK_WITHIN_S)
            except Unreachable:
                continue
            if _is_idle(slots, slot):
                with self._turn:
                    steps = pool.learned(slot)
                    if steps:
                        self.begin(pool, steps)

    def _look(self, pool: SlotPool, claims: Sequence[Claim]) -> None:
        """Twice, with a pause; a server that does not say it for sure is believed to compute."""
        try:
            for look in range(2):
                if look and self._ended.wait(LEAK_LOOK_S):
                    return
                slots = self._server.get("/slots", LOOK_WITHIN_S)
                claims = [claim for claim in claims if _is_idle(slots, claim.slot, surely=True)]
                if not claims:
                    return
            with self._turn:
                for claim in claims:
                    log.count("llamacpp_claim_leaked")
                    steps = pool.reclaim(claim)
                    if steps:
                        self.begin(pool, steps)
                self._turn.notify_all()
        except Unreachable:
            return
        finally:
            self._looks = False


def _is_idle(slots: object, slot: int, *, surely: bool = False) -> bool:
    """Whether the server says that this slot computes nothing; `surely`: in so many words."""
    if not isinstance(slots, list):
        return False
    told = [one.get("is_processing") for one in slots if isinstance(one, Mapping) and one.get("id") == slot]
    return bool(told) and (told[0] is False or (not surely and not told[0]))
