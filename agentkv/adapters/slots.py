"""SlotPool: which session's context is in which of a server's slots, and in which file.

Covers the bookkeeping for more sessions than slots, as instructions to save, restore and erase. No I/O and no clock:
whoever carries the instructions out says so before (`begin`) and tells what came of them (`settle`); in between their slots
and sessions are left alone. A slot whose instruction was never answered is nobody's until the server has been asked
(`learned`). Wrong beliefs cost time, never tokens: the server compares the prompt with what a slot really holds. File names
are counters, never a session's name, and are used again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Deed = Literal["save", "restore", "erase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An instruction: `file` is "" where none is needed."""

    deed: Deed
    slot: int
    session: str
    file: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A slot that a call was given, and when."""

    session: str
    slot: int
    since_s: float


class Fate(StrEnum):
    """What became of a step. LOST: the server never answered, so nobody knows. SKIPPED: not asked for, after one that was lost, or
    whose save was refused.
    """

    DONE = "done"
    REFUSED = "refused"
    LOST = "lost"
    SKIPPED = "skipped"


@dataclass(slots=True)
class Held:
    """What is known of one session.

    `clean`: the file holds what the slot holds. `sure`: so does the slot itself. `over`: drop it as soon as it is idle.
    `moving`: steps about it are under way. `tokens` are in its slot, if it has one, and `saved` in its file.
    `lay`: where it was when the server went away; if only the way there was broken, it still is.
    """

    slot: int | None = None
    lay: int | None = None
    file: str = ""
    clean: bool = False
    sure: bool = True
    busy: bool = False
    over: bool = False
    moving: bool = False
    tokens: int = 0
    saved: int = 0
    due_s: float | None = None
    used_s: float = 0.0

    def left_s(self, now_s: float) -> float:
        """How long until its next call, as far as anybody knows: silent or overdue for x, it stays so for about x."""
        due_s = self.used_s if self.due_s is None else self.due_s
        return abs(due_s - now_s)


class SlotPool:
    """Books of `slots` slots. Not thread-safe."""

    def __init__(self, slots: int, *, prefix: str) -> None:
        if slots < 1:
            raise ValueError(f"{slots} slots: at least one is needed")
        self.slots = slots
        self._prefix = prefix
        self.sessions: dict[str, Held] = {}
        self._files = 0
        self._spare: list[str] = []  # names of files that hold nothing
        self._stale: list[str] = []  # names of files of sessions that have ended
        self._emptying: set[str] = set()  # of those, the ones that are being overwritten with nothing
        self._moving: set[int] = set()  # slots with a step under way
        self._unknown: set[int] = set()  # slots of which nobody knows what they hold

    @property
    def moving(self) -> bool:
        """Whether steps are under way anywhere, or were lost and not learned again."""
        return bool(self._moving or self._unknown)

    def free_slots(self) -> list[int]:
        """Slots that no session holds, and in which nothing moves."""
        taken = {held.slot for held in self.sessions.values()} | self._moving | self._unknown
        return [slot for slot in range(self.slots) if slot not in taken]

    # -- steps under way

    def begin(self, steps: Sequence[Step]) -> None:
        """These steps are carried out from now on."""
        for step in steps:
            self._moving.add(step.slot)
            held = self.sessions.get(step.session)
            if held is not None:
                held.moving = True

    def settle(self, fates: Sequence[tuple[Step, Fate]]) -> list[Step]:
        """What became of steps that had begun; what is to be done next, for sessions that ended meanwhile.

        After a lost step its slot is nobody's: the session that was to be there starts anew, or from its file.
        """
        for step, fate in fates:
            if fate is not Fate.DONE:
                self.failed(step, tried=fate is not Fate.SKIPPED)
            elif step.file in self._emptying:
                self._emptying.remove(step.file)
                self._spare.append(step.file)
        for step, fate in fates:
            self._rests(step, fate)
        for held in self.sessions.values():
            if held.slot in self._unknown:
                held.slot, held.busy = None, False
        ended = [name for name, held in self.sessions.items() if held.over and not held.busy and not held.moving]
        return [step for name in ended for step in self.drop(name)]

    def _rests(self, step: Step, fate: Fate) -> None:
        """Nothing moves any more where this step was."""
        self._moving.discard(step.slot)
        held = self.sessions.get(step.session)
        if held is not None:
            held.moving = False
        if step.slot >= self.slots:
            return  # the server was restarted without it
        if fate is Fate.LOST:
            self._unknown.add(step.slot)
        elif fate is Fate.SKIPPED and step.deed == "erase" and held is not None and held.slot is None:
            held.slot = step.slot  # what could not be saved is still there

    def is_unknown(self, slot: int) -> bool:
        """Whether nobody knows what this slot holds."""
        return slot in self._unknown

    def learned(self, slot: int) -> list[Step]:
        """The server answers for this slot again: it is used again once it has been erased, whatever it holds."""
        if slot not in self._unknown:
            return []
        self._unknown.remove(slot)
        return [Step(deed="erase", slot=slot, session="")]

    def give_up(self, session: str) -> None:
        """Its call did not wait for its steps, and went without a slot."""
        held = self.sessions.get(session)
        if held is not None:
            held.busy = False

    # -- sessions

    def claim(self, session: str, now_s: float) -> tuple[int, list[Step]] | None:
        """A slot for a call of `session`, which is busy from now on, and what must be done first.

        None while every slot computes or moves, or while another call of this session runs or steps about it do.
        """
        held = self.sessions.get(session) or Held()
        if held.busy or held.moving:
            return None
        steps: list[Step] = []
        if held.slot is None:
            room = self._room(now_s, least_s=-1.0)
            if room is None:
                return None
            slot, steps = room
            steps += self._brought(session, held, slot)
        elif not held.sure:
            steps = self._brought(session, held, held.slot)
        self.sessions[session] = held
        held.busy, held.due_s, held.used_s = True, None, now_s
        assert held.slot is not None
        return held.slot, steps

    def release(self, session: str, now_s: float, *, tokens: int) -> list[Step]:
        """The call of `session` is over, and its slot holds more than its file; what to do if the session is, too."""
        held = self.sessions.get(session)
        if held is None or not held.busy:
            return [] if held is None or not held.over else self.drop(session)
        held.busy, held.clean, held.sure, held.used_s = False, False, True, now_s
        held.tokens = tokens if tokens > 0 else held.tokens  # else it was not answered, or nobody told
        return self.drop(session) if held.over else []

    def save(self, session: str) -> list[Step]:
        """Copy an idle slot to the session's file, unless that is done."""
        held = self.sessions.get(session)
        if held is None or held.busy or held.moving or held.slot is None or held.clean or not held.sure:
            return []
        held.file = held.file or self._name()
        held.clean, held.saved = True, held.tokens
        return [Step(deed="save", slot=held.slot, session=session, file=held.file)]

    def leave(self, session: str) -> list[Step]:
        """Save, and free the slot."""
        steps = self.save(session)
        held = self.sessions.get(session)
        if held is None or held.busy or held.moving or held.slot is None:
            return steps
        steps.append(Step(deed="erase", slot=held.slot, session=session))
        held.slot = None
        return steps

    def bring_back(self, session: str, now_s: float) -> list[Step] | None:
        """Restore the session's file into a slot that is free, or whose session is due later; None if there is none."""
        held = self.sessions.get(session)
        if held is None or held.busy or held.moving or held.slot is not None or not held.file:
            return []
        room = self._room(now_s, least_s=held.left_s(now_s))
        if room is None:
            return None
        slot, steps = room
        return steps + self._brought(session, held, slot)

    def drop(self, session: str) -> list[Step]:
        """The session is over: its slot is erased, and its file is overwritten with nothing as soon as may be.

        Told again, it overwrites the files that could not be before.
        """
        held = self.sessions.get(session)
        if held is not None and (
            held.busy or held.moving
        ):  # its last call was given up, and the slot computes until that is noticed
            held.over = True
            return []
        slot = lay = None
        if held is not None:
            del self.sessions[session]
            slot, lay = held.slot, held.lay
            if held.file:
                self._stale.append(held.file)
        free = self.free_slots()
        if slot is None and lay in free:
            slot = lay
        elif slot is None and self._stale and free:
            slot = free[0]
        if slot is None:
            return []
        steps = [Step(deed="erase", slot=slot, session=session)]
        steps += [Step(deed="save", slot=slot, session=session, file=name) for name in self._stale]
        self._emptying.update(self._stale)
        self._stale = []
        return steps

    def failed(self, step: Step, *, tried: bool = True) -> None:
        """A step was not carried out: what it was to copy counts as lost, except in a file that nobody tried to read."""
        if step.deed == "erase":
            return
        if step.file in self._emptying:
            self._emptying.remove(step.file)
            self._stale.append(step.file)
        held = self.sessions.get(step.session)
        if held is not None and held.file == step.file and (tried or step.deed == "save"):  # its content is unknown now
            held.file, held.clean = "", False
            if step.deed == "restore":
                held.tokens = 0
            self._stale.append(step.file)

    def disturb(self) -> None:
        """Somebody else may have used any idle slot: bring contexts back from their files before trusting a slot."""
        for held in self.sessions.values():
            if not held.busy:
                held.sure = False

    def overdue(self, before_s: float) -> list[Claim]:
        """Calls that were given a slot before then, and whose end nobody has told."""
        return [
            Claim(session=name, slot=held.slot, since_s=held.used_s) for name, held in self.sessions.items()
            if held.busy and not held.moving and held.slot is not None and held.used_s <= before_s
        ]  # fmt: skip

    @property
    def lingers(self) -> bool:
        """Whether a session is over, and only its call is not."""
        return any(held.over and held.busy for held in self.sessions.values())

    def reclaim(self, claim: Claim) -> list[Step]:
        """The server does not compute this call, so nobody will tell its end; what the slot holds is not sure."""
        held = self.sessions.get(claim.session)
        if held is None or not held.busy or held.moving or (held.slot, held.used_s) != (claim.slot, claim.since_s):
            return []
        held.busy, held.sure, held.clean = False, False, False
        return self.drop(claim.session) if held.over else []

    def forget_slots(self) -> None:
        """The server has restarted: slots are empty, files are there."""
        for held in self.sessions.values():
            held.sure = held.busy
            if not held.busy and not held.moving:
                held.lay, held.slot = held.lay if held.slot is None else held.slot, None

    def recount(self, slots: int) -> None:
        """The server has restarted with so many slots. What lies in files stays known; calls that it computed are lost."""
        self.slots = slots
        self._unknown = {slot for slot in self._unknown if slot < slots}
        for held in self.sessions.values():
            held.slot, held.busy, held.sure = None, False, False

    def check(self) -> None:
        """Every redundant fact, recomputed; AssertionError where the books are wrong."""
        slots = [held.slot for held in self.sessions.values() if held.slot is not None]
        assert len(set(slots)) == len(slots), "two sessions in one slot"
        assert all(0 <= slot < self.slots for slot in slots), "a slot that does not exist"
        files = [held.file for held in self.sessions.values() if held.file]
        files += [*self._spare, *self._stale, *self._emptying]
        assert len(set(files)) == len(files), "one file for two"
        assert len(files) <= self._files, "a file from nowhere"
        assert self._unknown.isdisjoint(slots), "a session in a slot of which nobody knows what it holds"
        for held in self.sessions.values():
            assert held.slot is not None or not held.busy, "a call without a slot"
            assert held.file or not held.clean, "clean without a file"

    def _room(self, now_s: float, *, least_s: float) -> tuple[int, list[Step]] | None:
        """A free slot, or that of the idle session that is due last (in more than `least_s`), saved first."""
        free = self.free_slots()
        if free:
            return free[0], []
        idle = [
            (h.left_s(now_s), name) for name, h in self.sessions.items()
            if h.slot is not None and not h.busy and not h.moving
        ]  # fmt: skip
        if not idle or max(idle)[0] <= least_s:
            return None
        name = max(idle)[1]
        steps = self.save(name)
        slot = self.sessions[name].slot
        assert slot is not None
        self.sessions[name].slot = None
        return slot, steps

    def _brought(self, session: str, held: Held, slot: int) -> list[Step]:
        """Put the session into `slot`, with what its file holds: an older context is still the beginning of the newest."""
        held.slot, held.lay, held.sure, held.clean = slot, None, True, bool(held.file)
        held.tokens = held.saved if held.file else 0
        if not held.file:
            return []
        return [Step(deed="restore", slot=slot, session=session, file=held.file)]

    def _name(self) -> str:
        if self._spare:
            return self._spare.pop()
        self._files += 1
        return f"{self._prefix}-{self._files}.bin"
