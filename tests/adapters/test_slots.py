"""SlotPool: whatever happens in whatever order, the books hold, and a context is where they say."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentkv.adapters.slots import SlotPool

SESSIONS = st.sampled_from(["a", "b", "c", "d"])


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
    assert [("erase", ""), ("save", saved.file)] == [(step.deed, step.file) for step in pool.drop("a")]
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


class Machine(RuleBasedStateMachine):
    """Random calls over a model of what slots and files really hold; some steps fail."""

    def __init__(self):
        super().__init__()
        self.pool = SlotPool(2, prefix="t")
        self.slots: dict[int, str] = {}
        self.files: dict[str, str] = {}
        self.now_s = 0.0

    def carry_out(self, steps, fails=False, caller=None):
        for step in steps or ():
            others = (held for name, held in self.pool.sessions.items() if name != caller)
            assert not any(held.busy and held.slot == step.slot for held in others)
            if fails:
                self.pool.failed(step)
            elif step.deed == "save":
                self.files[step.file] = self.slots.get(step.slot, "")
            elif step.deed == "restore":
                self.slots[step.slot] = self.files.get(step.file, "")
                assert step.session == self.slots[step.slot]
            else:
                self.slots[step.slot] = ""

    @rule(session=SESSIONS, fails=st.booleans())
    def call(self, session, fails):
        self.now_s += 1
        claim = self.pool.claim(session, self.now_s)
        if claim is not None:
            self.carry_out(claim[1], fails, caller=session)
            self.slots[claim[0]] = session

    @rule(session=SESSIONS)
    def end(self, session):
        self.carry_out(self.pool.release(session, self.now_s, tokens=10))

    @rule(session=SESSIONS, fails=st.booleans(), due_s=st.floats(0, 100))
    def wait(self, session, fails, due_s):
        if session in self.pool.sessions:
            self.pool.sessions[session].due_s = due_s
        self.carry_out(self.pool.save(session), fails)

    @rule(session=SESSIONS, fails=st.booleans())
    def leave(self, session, fails):
        self.carry_out(self.pool.leave(session), fails)

    @rule(session=SESSIONS)
    def back(self, session):
        self.carry_out(self.pool.bring_back(session, self.now_s))

    @rule(session=SESSIONS)
    def drop(self, session):
        self.carry_out(self.pool.drop(session))

    @rule()
    def somebody_else(self):
        for held in self.pool.sessions.values():
            if held.slot is not None and not held.busy:
                self.slots[held.slot] = "stranger"
        self.pool.disturb()

    @rule()
    def restart(self):
        if not any(held.busy for held in self.pool.sessions.values()):
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
