"""SlotPool: whatever happens in whatever order, the books hold, and a context is where they say."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentkv.adapters.slots import Fate, SlotPool

SESSIONS = st.sampled_from(["a", "b", "c", "d"])
FATES = st.lists(st.sampled_from([Fate.DONE, Fate.REFUSED, Fate.LOST]), max_size=4)


def done(pool, session, now_s=1.0, tokens=100):
    slot, steps = pool.claim(session, now_s)
    pool.release(session, now_s, tokens=tokens)
    pool.check()
    return slot, [(step.deed, step.slot, step.session) for step in steps]


def test_a_session_comes_back_to_its_slot():
    """Nothing is copied as long as nobody takes it."""
    pool = SlotPool(2, prefix="t")
    slot, steps = done(pool, "a")
    assert [] == steps
    assert (slot, []) == done(pool, "a", 2.0)


def test_a_third_session_takes_the_slot_of_the_one_that_is_due_last():
    """That one is saved first, and restored when it calls again."""
    pool = SlotPool(2, prefix="t")
    done(pool, "a")
    done(pool, "b")
    pool.sessions["a"].due_s, pool.sessions["b"].due_s = 5.0, 50.0
    slot, steps = done(pool, "c")
    assert (1, [("save", 1, "b")]) == (slot, steps)
    pool.sessions["c"].due_s = 90.0
    assert (1, [("save", 1, "c"), ("restore", 1, "b")]) == done(pool, "b")


def test_a_saved_context_gives_way_without_a_copy():
    """What was written ahead is not written again."""
    pool = SlotPool(1, prefix="t")
    done(pool, "a")
    assert ["save"] == [step.deed for step in pool.save("a")]
    assert [] == pool.save("a")
    assert (0, []) == done(pool, "b")


def test_a_busy_slot_is_never_touched():
    """An action on it would hang until the call is over."""
    pool = SlotPool(1, prefix="t")
    assert pool.claim("a", 1.0) is not None
    assert pool.claim("b", 1.0) is None
    assert pool.claim("a", 1.0) is None
    assert [] == pool.save("a") + pool.leave("a") + pool.drop("a")


def test_bringing_back_never_pushes_out_whoever_is_due_sooner():
    """A prefetch is for a slot that nobody needs before."""
    pool = SlotPool(1, prefix="t")
    done(pool, "a")
    pool.leave("a")
    done(pool, "b")
    pool.sessions["a"].due_s, pool.sessions["b"].due_s = 9.0, 5.0
    assert pool.bring_back("a", 2.0) is None
    pool.sessions["b"].due_s = 20.0
    assert [("save", "b"), ("restore", "a")] == [(s.deed, s.session) for s in pool.bring_back("a", 2.0)]


def test_an_ended_session_leaves_an_empty_file_whose_name_is_used_again():
    """Its content is overwritten with an erased slot, for there is no way to delete a file."""
    pool = SlotPool(1, prefix="t")
    done(pool, "a")
    (saved,) = pool.save("a")
    steps = pool.drop("a")
    assert [("erase", ""), ("save", saved.file)] == [(step.deed, step.file) for step in steps]
    pool.begin(steps)
    assert pool.claim("b", 1.0) is None
    assert [] == pool.settle([(step, Fate.DONE) for step in steps])
    done(pool, "b")
    assert saved.file == pool.save("b")[0].file


def test_a_session_that_ends_in_the_middle_of_a_call_is_dropped_after_it():
    """The slot is nobody's until the server has noticed."""
    pool = SlotPool(1, prefix="t")
    pool.claim("a", 1.0)
    assert [] == pool.drop("a")
    assert pool.claim("b", 1.0) is None
    assert ["erase"] == [step.deed for step in pool.release("a", 2.0, tokens=5)]
    assert pool.claim("b", 3.0) is not None


def test_after_a_disturbance_the_file_is_believed_and_the_slot_is_not_saved():
    """A slot that somebody else may have used must not overwrite the only good copy."""
    pool = SlotPool(2, prefix="t")
    done(pool, "a")
    pool.save("a")
    done(pool, "b")
    pool.disturb()
    assert [] == pool.save("b")
    assert (0, [("restore", 0, "a")]) == done(pool, "a")


def test_a_failed_save_loses_the_context_and_nothing_else():
    """The file is believed to hold nothing; the session starts anew."""
    pool = SlotPool(1, prefix="t")
    done(pool, "a")
    _, steps = pool.claim("b", 2.0)
    pool.failed(steps[0])
    pool.release("b", 2.0, tokens=1)
    pool.check()
    assert "" == pool.sessions["a"].file
    assert [("save", "b")] == [(step.deed, step.session) for step in pool.claim("a", 3.0)[1]]


def settled(pool, steps, *fates):
    pool.begin(steps)
    following = pool.settle(list(zip(steps, fates, strict=True)))
    pool.check()
    return following


def test_what_moves_is_left_alone():
    """Neither its slot nor its session is planned with until the step has been answered."""
    pool = SlotPool(2, prefix="t")
    done(pool, "a")
    steps = pool.save("a")
    pool.begin(steps)
    assert [] == pool.save("a") + pool.leave("a") + (pool.bring_back("a", 1.0) or []) + pool.drop("a")
    assert pool.claim("a", 2.0) is None
    assert (1, []) == done(pool, "b")
    assert (1, [("save", 1, "b")]) == done(pool, "c")
    assert ["erase", "save"] == [step.deed for step in pool.settle([(steps[0], Fate.DONE)])]


def test_a_slot_whose_step_was_lost_is_nobodys_until_it_is_learned_and_erased():
    """Nothing is restored into it blindly, and who was there starts anew in another."""
    pool = SlotPool(2, prefix="t")
    done(pool, "a")
    assert [] == settled(pool, pool.save("a"), Fate.LOST)
    assert [1] == pool.free_slots()
    assert (1, []) == done(pool, "a")
    assert [] == pool.learned(1)
    (step,) = pool.learned(0)
    assert ("erase", 0) == (step.deed, step.slot)
    assert [] == settled(pool, [step], Fate.DONE)
    assert [0] == pool.free_slots()


def test_a_call_whose_restore_was_lost_has_no_slot():
    """It is not sent to a slot of which nobody knows what it holds."""
    pool = SlotPool(2, prefix="t")
    done(pool, "a")
    settled(pool, pool.leave("a"), Fate.DONE, Fate.DONE)
    slot, steps = pool.claim("a", 5.0)
    assert ["restore"] == [step.deed for step in steps]
    settled(pool, steps, Fate.LOST)
    held = pool.sessions["a"]
    assert (None, False, "") == (held.slot, held.busy, held.file)
    assert slot not in pool.free_slots()


def test_a_file_that_nobody_tried_to_read_is_still_good():
    """The save before it in the same slot was lost, so the restore was not asked for."""
    pool = SlotPool(1, prefix="t")
    done(pool, "a")
    settled(pool, pool.leave("a"), Fate.DONE, Fate.DONE)
    done(pool, "b")
    file = pool.sessions["a"].file
    _, steps = pool.claim("a", 5.0)
    assert ["save", "restore"] == [step.deed for step in steps]
    settled(pool, steps, Fate.LOST, Fate.SKIPPED)
    assert (file, "") == (pool.sessions["a"].file, pool.sessions["b"].file)


def test_a_session_that_ended_in_a_call_that_a_restart_ended_is_dropped():
    """Its file is emptied though its slot is nobody's any more."""
    pool = SlotPool(2, prefix="t")
    done(pool, "a")
    settled(pool, pool.save("a"), Fate.DONE)
    pool.claim("a", 2.0)
    assert [] == pool.drop("a")
    pool.recount(1)
    assert ["erase", "save"] == [step.deed for step in pool.release("a", 3.0, tokens=0)]
    assert {} == pool.sessions


def test_an_end_whose_steps_were_lost_empties_its_file_when_it_is_told_again():
    """As Reach does when the server answers."""
    pool = SlotPool(2, prefix="t")
    done(pool, "a")
    settled(pool, pool.save("a"), Fate.DONE)
    assert [] == settled(pool, pool.drop("a"), Fate.LOST, Fate.SKIPPED)
    assert ["erase", "save"] == [step.deed for step in pool.drop("a")]
    assert [] == pool.drop("never heard of")


def test_a_context_that_could_not_be_saved_stays_in_its_slot():
    """A full disk must not cost it."""
    pool = SlotPool(1, prefix="t")
    done(pool, "a")
    settled(pool, pool.leave("a"), Fate.REFUSED, Fate.SKIPPED)
    held = pool.sessions["a"]
    assert (0, "", True, False) == (held.slot, held.file, held.sure, held.clean)
    assert (0, []) == done(pool, "a")


def test_a_restart_with_fewer_slots_forgets_no_file():
    """Sessions in slots that are gone come from their files, steps under way in them end, and names are never given twice."""
    pool = SlotPool(3, prefix="t")
    for name in "abc":
        done(pool, name)
    settled(pool, pool.save("a"), Fate.DONE)
    settled(pool, pool.leave("b"), Fate.LOST, Fate.SKIPPED)
    pool.claim("c", 3.0)
    moving = pool.save("a") or pool.leave("a")
    pool.begin(moving)
    pool.recount(1)
    pool.check()
    assert [] == pool.settle([(step, Fate.LOST) for step in moving])
    file = pool.sessions["a"].file
    assert [] == pool.release("c", 4.0, tokens=5)
    for step in pool.learned(0):
        settled(pool, [step], Fate.DONE)
    assert (0, [("restore", 0, "a")]) == done(pool, "a")
    assert (0, [("save", 0, "a")]) == done(pool, "c")
    settled(pool, pool.save("c"), Fate.DONE)
    assert pool.sessions["c"].file not in ("", file)
    assert not pool.is_unknown(1)


def test_a_slot_is_taken_back_only_from_the_call_that_was_looked_at():
    """The session may have ended it and called again meanwhile."""
    pool = SlotPool(1, prefix="t")
    pool.claim("a", 1.0)
    assert [] == pool.overdue(0.5)
    (claim,) = pool.overdue(1.0)
    pool.release("a", 2.0, tokens=5)
    assert [] == pool.overdue(9.0)
    pool.claim("a", 3.0)
    pool.reclaim(claim)
    assert pool.claim("b", 4.0) is None
    (claim,) = pool.overdue(3.0)
    pool.reclaim(claim)
    assert [] == pool.save("a")  # nobody knows what its slot holds
    assert (0, []) == done(pool, "b", 5.0)
    assert [] == pool.release("a", 6.0, tokens=5)  # the client was only slow
    pool.check()


def test_a_session_that_is_over_goes_with_the_call_that_was_given_up():
    """Its slot is erased."""
    pool = SlotPool(1, prefix="t")
    pool.claim("a", 1.0)
    pool.drop("a")
    assert pool.lingers
    assert ["erase"] == [step.deed for claim in pool.overdue(1.0) for step in pool.reclaim(claim)]
    assert not pool.lingers


def test_a_call_is_expected_to_find_what_its_slot_was_given():
    """What its file held, not what it once had; nothing where it starts anew. A call of unknown size changes neither."""
    pool = SlotPool(1, prefix="t")
    done(pool, "a", tokens=100)
    settled(pool, pool.save("a"), Fate.DONE)
    done(pool, "a", tokens=900)
    assert 900 == pool.sessions["a"].tokens
    pool.disturb()
    _, steps = pool.claim("a", 2.0)
    settled(pool, steps, Fate.DONE)
    assert 100 == pool.sessions["a"].tokens
    pool.release("a", 2.0, tokens=0)
    assert 100 == pool.sessions["a"].tokens
    pool.disturb()
    _, steps = pool.claim("a", 3.0)
    settled(pool, steps, Fate.REFUSED)
    assert 0 == pool.sessions["a"].tokens


class Machine(RuleBasedStateMachine):
    """Random calls over a model of what slots and files really hold; some steps fail."""

    def __init__(self):
        super().__init__()
        self.pool = SlotPool(2, prefix="t")
        self.slots: dict[int, str] = {}
        self.files: dict[str, str] = {}
        self.now_s = 0.0

    def carry_out(self, steps, fates=(), caller=None):
        """Fates in turn, DONE after the last; whatever is lost may have been done or not."""
        steps = list(steps or ())
        self.pool.begin(steps)
        self.pool.check()
        told = []
        for step, fate in zip(steps, (*fates, *[Fate.DONE] * len(steps)), strict=False):
            unsaved = any(one.deed == "save" and kind is Fate.REFUSED and one.slot == step.slot for one, kind in told)
            if (told and told[-1][1] in (Fate.LOST, Fate.SKIPPED)) or (unsaved and step.deed == "erase"):
                fate = Fate.SKIPPED  # noqa: PLW2901  as the adapter does
            others = (held for name, held in self.pool.sessions.items() if name != caller)
            assert not any(held.busy and held.slot == step.slot for held in others)
            if fate is Fate.LOST and step.deed != "save":
                self.slots[step.slot] = "nobody knows"
            elif fate is not Fate.DONE:
                pass
            elif step.deed == "save":
                self.files[step.file] = self.slots.get(step.slot, "")
            elif step.deed == "restore":
                self.slots[step.slot] = self.files.get(step.file, "")
                assert step.session == self.slots[step.slot]
            else:
                self.slots[step.slot] = ""
            told.append((step, fate))
        following = self.pool.settle(told)
        if following:
            self.carry_out(following)

    @rule(session=SESSIONS, fates=FATES)
    def call(self, session, fates):
        self.now_s += 1
        claim = self.pool.claim(session, self.now_s)
        if claim is not None:
            self.carry_out(claim[1], fates, caller=session)
            if self.pool.sessions[session].busy:
                self.slots[claim[0]] = session

    @rule(session=SESSIONS)
    def end(self, session):
        self.carry_out(self.pool.release(session, self.now_s, tokens=10))

    @rule(fates=FATES, older_s=st.integers(0, 3))
    def looked(self, fates, older_s):
        for claim in self.pool.overdue(self.now_s - older_s):
            self.slots[claim.slot] = "nobody knows"
            self.carry_out(self.pool.reclaim(claim), fates)

    @rule(session=SESSIONS, fates=FATES, due_s=st.floats(0, 100))
    def wait(self, session, fates, due_s):
        if session in self.pool.sessions:
            self.pool.sessions[session].due_s = due_s
        self.carry_out(self.pool.save(session), fates)

    @rule(session=SESSIONS, fates=FATES)
    def leave(self, session, fates):
        self.carry_out(self.pool.leave(session), fates)

    @rule(session=SESSIONS, fates=FATES)
    def back(self, session, fates):
        self.carry_out(self.pool.bring_back(session, self.now_s), fates)

    @rule(session=SESSIONS, fates=FATES)
    def drop(self, session, fates):
        self.carry_out(self.pool.drop(session), fates)

    @rule(slot=st.integers(0, 2), fates=FATES)
    def learned(self, slot, fates):
        self.carry_out(self.pool.learned(slot), fates)

    @rule()
    def somebody_else(self):
        for held in self.pool.sessions.values():
            if held.slot is not None and not held.busy:
                self.slots[held.slot] = "stranger"
        self.pool.disturb()

    @rule(slots=st.integers(1, 3))
    def restart(self, slots):
        if slots != self.pool.slots:
            self.slots = {}
            self.pool.recount(slots)
        elif not any(held.busy for held in self.pool.sessions.values()):
            self.slots = {}
            self.pool.forget_slots()

    @invariant()
    def books_hold(self):
        self.pool.check()
        for session, held in self.pool.sessions.items():
            if held.slot is not None and held.sure and held.clean:
                assert session == self.slots.get(held.slot)
            if held.clean:
                assert session == self.files[held.file]


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
