"""What the engine remembers of sessions stays within limits, and what it forgets is forgotten everywhere."""

import time

import pytest

from agentkv import AgentKV, Context, Message, Request, Sampling
from agentkv.core.task import Caller
from agentkv.engine.local import sessions as sessions_module
from agentkv.engine.local.sessions import Session, Sessions, Told
from agentkv.engine.local.tokeniser import Tokeniser
from agentkv.engine.local.transcript import Transcript


def _call(sessions, task, *, branch="", wanted=None, ends=True):
    """A call of its own session; (session, keys forgotten for it)."""
    caller = Caller(task=task, branch=branch)
    session = sessions.choose(caller, "no prompt in common", wanted)
    _, forgotten = sessions.join(session, caller)
    if ends:
        sessions.leave(session)
    return session, forgotten


@pytest.fixture
def few(monkeypatch):
    """Sessions with small limits."""
    monkeypatch.setattr(sessions_module, "_IDLE_TASKS", 3)
    monkeypatch.setattr(sessions_module, "_SESSIONS_PER_TASK", 2)
    monkeypatch.setattr(sessions_module, "_BRANCHES", 3)
    return Sessions()


def test_a_choice_may_end_while_a_prompt_is_compared_with_the_others(tiny, monkeypatch):
    """The engine's thread writes while a caller's reads: the caller sees the choices that there were."""
    tokeniser, call = Tokeniser(tiny.loaded.tokenizer), object()
    session = Session(key="t#1", task="t")

    def told(text):
        return Told(prompt=Transcript(text="ask", ids=[1]), written=text, token_ids=[], computed_tokens=len(text))

    for number, text in enumerate(("no", "yes, so")):
        session.take(told(text), f"t#1/{number}", call, tokeniser)
    compare = Told.shared_chars

    def meanwhile(self, prompt):
        session.take(told("another"), f"t#1/{len(session.others)}", call, tokeniser)
        return compare(self, prompt)

    monkeypatch.setattr(Told, "shared_chars", meanwhile)
    assert 7 == session.base("askyes, so it goes on", tokeniser)[1]
    assert 5 == len(session.others)


def test_the_task_that_was_idle_longest_is_forgotten(few):
    """With all its sessions; whoever was used since stays."""
    for task in ("a", "b", "c"):
        assert [] == _call(few, task, wanted=f"{task}-1")[1]
    _call(few, "a", wanted="a-2")
    assert ["b-1"] == _call(few, "d", wanted="d-1")[1]
    assert few.last_session(Caller(task="b")) is None
    assert "a-2" == few.last_session(Caller(task="a"))
    assert 4 == few.count()


def test_a_task_is_idle_from_the_end_of_its_call_on(few):
    """A long call is no reason to be forgotten right after it."""
    long, _ = _call(few, "long", ends=False)
    for task in ("b", "c"):
        _call(few, task, wanted=f"{task}-1")
    few.leave(long)
    assert ["b-1"] == _call(few, "d")[1]


def test_busy_tasks_are_never_forgotten(few):
    """However many: the idle ones beside them go first, and none if there is none."""
    busy = [_call(few, f"busy-{number}", ends=False)[0] for number in range(5)]
    assert 5 == few.count()
    assert not any(session.dropped for session in busy)
    _, forgotten = _call(few, "idle", wanted="idle-1")
    assert [] == forgotten
    assert ["idle-1"] == _call(few, "next", ends=False)[1]
    for session in busy:
        few.leave(session)
    _call(few, "last")
    assert 3 == few.count()


def test_a_surplus_session_is_nobodys_last_session(few):
    """The planner must not move what the engine has forgotten."""
    for branch in ("x", "y", "z"):
        _, forgotten = _call(few, "t", branch=branch, wanted=f"t-{branch}")
    assert ["t-x"] == forgotten
    assert few.last_session(Caller(task="t", branch="x")) is None
    assert "t-z" == few.last_session(Caller(task="t", branch="z"))


def test_branches_are_remembered_up_to_a_limit(few):
    """Frameworks name a branch anew in each step; the latest ones count."""
    for number in range(10):
        session, _ = _call(few, "t", branch=f"step-{number}", wanted="t-1")
        _call(few, "t", branch="main", wanted="t-2")
    assert {"step-8": "t-1", "step-9": "t-1", "main": "t-2"} == few._tasks["t"].last
    assert ["step-7", "step-8", "step-9"] == list(session.branches)


def test_tasks_that_never_end_do_not_fill_the_engine(start, ask, monkeypatch):
    """Each call a task of its own, as graphs without a thread id make them: sessions and their blocks go again."""
    monkeypatch.setattr(sessions_module, "_IDLE_TASKS", 4)
    engine = start()
    for number in range(12):
        engine.submit(ask(f"{number} " + "words " * 8, 2, task=f"run-{number}")).result(60)
    assert 4 == engine.stats()["sessions"] == len(engine.tiers._book.holdings)


def test_a_finished_session_frees_its_blocks_and_its_task_goes_on(start, ask):
    """A segment of a task is over: its KV is gone, the other session of the task is as it was."""
    engine = start(blocks=64)
    one = engine.submit(ask("a" * 200, 2, task="t")).result(30).session
    other = engine.submit(ask("b" * 200, 2, task="t")).result(30).session
    held = engine.stats()["kv"]["device"]["used"]
    engine.finish_sessions([one, "unknown"])
    assert engine.residency(one) is None
    assert engine.residency(other) is not None
    assert engine.stats()["kv"]["device"]["used"] < held
    again = engine.submit(ask("b" * 200 + "c", 2, task="t")).result(30)
    assert other == again.session
    assert again.usage.cached_tokens > 0


def test_text_is_counted_with_the_models_own_tokenizer(start, tiny):
    """The count that context options go by."""
    text = "how many tokens are these?"
    assert len(tiny.ids(text)) == start().count_text(text)


@pytest.mark.parametrize("text", ["abc", "Köln 🎈", ""])
def test_a_texts_tokens_are_those_of_a_raw_prompt(start, text) -> None:
    """As many as are counted for it, and they say the text again."""
    engine = start()
    ids = engine.text_ids(text)
    assert text == engine._intake.tokeniser.decode(ids)
    if text:
        assert len(ids) == engine.count_tokens(Request(prompt=text))


def test_a_summary_made_while_a_tool_runs_leaves_no_session_behind(tiny, start):
    """It has a session of its own, which is gone afterwards; the conversation stays in the one that it had."""
    engine = start(blocks=400, host=400)
    said = "Goal: mend it\nFacts:\n- port 6543"
    context = Context(soft_mark=250, keep_last=2, summary_tokens=32)
    with AgentKV.with_engine(engine, context=context) as kv, kv.task("t", final=False):
        messages = [Message(role="user", content="mend it")]
        for number in range(6):
            kv.submit(Request(messages=tuple(messages), sampling=Sampling(max_tokens=2))).result(60)
            with kv.tool(f"tool{number}", expect_s=600):
                until_s = time.monotonic() + (20 if number == 5 else 0)
                while time.monotonic() < until_s and "summary" not in purposes(kv):
                    time.sleep(0.02)
            messages += [
                Message(role="assistant", content=f"step {number}"),
                Message(role="user", content=f"{said} {number}"),
            ]
        assert "summary" in purposes(kv)
        until_s = time.monotonic() + 10
        while engine.stats()["sessions"] > 1 and time.monotonic() < until_s:
            time.sleep(0.02)
        assert 1 == engine.stats()["sessions"]


def purposes(kv):
    """What the model calls so far were for."""
    return [call.purpose for call in kv.report("t").calls]
