"""AgentKV over a scripted engine: identity, budgets, hints, bills and lifetime, without a model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest

from agentkv import (
    AgentKV,
    Budget,
    BudgetExceeded,
    Caller,
    Hint,
    HintKind,
    Message,
    PriorityClass,
    Request,
    RequestInvalid,
    Sampling,
    ScriptedEngine,
    Usage,
    log,
)
from agentkv.clock import ManualClock
from agentkv.core.hint import ToolStatus
from agentkv.errors import Closed, ConfigError, LedgerError
from agentkv.runtime.build import last_session_of
from agentkv.runtime.hosts import PlainHost


def ask(text: str, *, max_tokens: int = 8) -> Request:
    return Request(messages=(Message(role="user", content=text),), sampling=Sampling(max_tokens=max_tokens))


@pytest.fixture
def kv():
    with AgentKV.with_engine(ScriptedEngine(["one two three"] * 50), host=PlainHost()) as made:
        yield made


def test_calls_inside_a_task_are_billed_to_it(kv):
    """The bill holds each call with its tokens, and nothing of another task."""
    with kv.task("a", final=False):
        kv.submit(ask("hello")).result(20)
        kv.submit(ask("hello again")).result(20)
    with kv.task("b", final=False):
        kv.submit(ask("other")).result(20)
    assert 2 == kv.report("a").usage.calls
    assert 1 == kv.report("b").usage.calls
    assert kv.report("a").usage.output_tokens == 2 * kv.report("b").usage.output_tokens


def test_a_call_outside_any_task_is_unattributed(kv):
    """Unknown callers never land on another task's bill."""
    with kv.task("a", final=False):
        pass
    kv.submit(ask("who am I")).result(20)
    assert 0 == kv.report("a").usage.calls
    assert 1 == kv.report("unattributed").usage.calls


def test_a_users_own_thread_is_unattributed_not_guessed(kv):
    """A thread pool loses the context variables; its calls go to nobody rather than to somebody else."""
    with kv.task("a", final=False):
        thread = threading.Thread(target=lambda: kv.submit(ask("from a thread")).result(20))
        thread.start()
        thread.join()
    assert 0 == kv.report("a").usage.calls
    assert 1 == kv.report("unattributed").usage.calls


def test_tasks_nest_and_the_inner_one_counts(kv):
    """The nearest explicit task is the caller."""
    with kv.task("outer", final=False):
        with kv.task("inner", final=False):
            kv.submit(ask("x")).result(20)
        kv.submit(ask("y")).result(20)
    assert 1 == kv.report("inner").usage.calls
    assert 1 == kv.report("outer").usage.calls


async def test_concurrent_async_tasks_keep_apart(kv):
    """Two coroutines in one loop are two tasks."""

    async def one(name: str) -> None:
        async with kv.task(name, final=False):
            for _ in range(3):
                await kv.submit(ask(name)).aresult()
                await asyncio.sleep(0)

    await asyncio.gather(one("a"), one("b"))
    assert [3, 3] == [kv.report(name).usage.calls for name in ("a", "b")]


def test_a_budget_refuses_before_anything_is_spent(kv):
    """Zero is a limit, and the engine never sees a refused call."""
    with kv.task("poor", budget=Budget(model_calls=0)), pytest.raises(BudgetExceeded):
        kv.submit(ask("may I?"))
    assert 0 == len(kv.engine.requests)


def test_a_token_budget_counts_input_and_reserved_output(kv):
    """The reservation covers the longest answer, so that the budget cannot be overrun."""
    with kv.task("t", budget=Budget(tokens=10), final=False), pytest.raises(BudgetExceeded) as caught:
        kv.submit(ask("hello", max_tokens=1000))
    assert "tokens" == caught.value.limit
    assert 0 == kv.report("t").usage.calls


def test_a_tool_call_limit_raises_at_the_tools_start(kv):
    """The tool does not run when its task may not call it."""
    ran = []
    with kv.task("t", budget=Budget(tool_calls=1)):
        with kv.tool("ls"):
            ran.append(1)
        with pytest.raises(BudgetExceeded), kv.tool("ls"):
            ran.append(2)
    assert [1] == ran


def test_hints_tell_a_tools_start_and_end_with_a_forecast(kv):
    """The start carries a distribution of the wait; arguments stay out but for the command word."""
    hints: list[Hint] = []
    kv.subscribe(hints.append)
    with kv.task("t"), kv.tool("shell", args={"cmd": "pytest -q /secret/path"}, expect_s=12.0):
        pass
    start, end = (hint for hint in hints if hint.call is not None)
    assert (HintKind.TOOL_START, HintKind.TOOL_END) == (start.kind, end.kind)
    assert "pytest" == start.call.command
    assert 12.0 == pytest.approx(start.wait.quantile_s(0.5))
    assert "secret" not in repr(hints)
    assert ToolStatus.SUCCEEDED == end.call.status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("broken"), ToolStatus.FAILED),
        (asyncio.CancelledError(), ToolStatus.CANCELLED),
        (KeyboardInterrupt(), ToolStatus.CANCELLED),
        (TimeoutError(), ToolStatus.FAILED),
    ],
)
def test_what_a_tool_raises_passes_and_closes_the_call(kv, error, status):
    """The same exception object comes out, and exactly one end is told."""
    hints: list[Hint] = []
    kv.subscribe(hints.append)
    with pytest.raises(type(error)) as caught, kv.task("t"), kv.tool("x"):
        raise error
    assert error is caught.value
    assert [status] == [h.call.status for h in hints if h.kind in (HintKind.TOOL_END, HintKind.TOOL_ERROR)]


def test_a_subscriber_that_fails_disturbs_nobody(kv):
    """Hints fail into a counter."""

    def bad(_hint: Hint) -> None:
        raise RuntimeError("my dashboard is down")

    kv.subscribe(bad)
    with kv.task("t"), kv.tool("x"):
        pass
    kv.submit(ask("still works")).result(20)


def test_progress_outside_its_range_is_ignored(kv):
    """A tool that reports nonsense is not trusted and not punished."""
    with kv.task("t"), kv.tool("x") as call:
        for share in (-1.0, 0.0, float("nan"), 2.0):
            call.progress(share)
        call.progress(0.5)


def test_a_final_task_is_destroyed_and_can_be_finished_twice(kv):
    """`finish` is idempotent, also for keys that never were."""
    with kv.task("t"):
        kv.submit(ask("x")).result(20)
    kv.finish("t")
    kv.finish("never-heard-of")
    assert 1 == kv.report("t").usage.calls


def test_a_tasks_priority_reaches_its_requests(kv):
    """A foreground task's calls are foreground calls."""
    with kv.task("t", priority=PriorityClass.FOREGROUND):
        kv.submit(ask("x")).result(20)
    assert PriorityClass.FOREGROUND == kv.engine.requests[-1].priority


def test_an_aborted_stream_is_on_the_bill(kv):
    """Walking away from a stream is one row with the input that was read."""
    with kv.task("t", final=False):
        stream = kv.submit(ask("go on and on"))
        stream.cancel()
    assert 1 == kv.report("t").usage.calls


def test_closed_means_closed(kv):
    """Use after close is a typed error, closing twice is fine."""
    kv.close()
    kv.close()
    with pytest.raises(Closed):
        kv.submit(ask("x"))
    with pytest.raises(Closed):
        kv.task("t")


@pytest.mark.parametrize(
    "options",
    [
        {"policy": "magic"},
        {"device_memory": 0},
        {"device_memory": "many"},
        {"host_memory": 0},
        {"host_memory": None, "disk": "somewhere"},
    ],
)
def test_local_refuses_options_that_cannot_work_before_it_loads_anything(options):
    """The message names the option; no model is touched."""
    with pytest.raises(ConfigError) as caught:
        AgentKV.local(model="/nowhere/at/all", **options)
    assert any(name in str(caught.value) for name in (*options, "disk"))


def test_a_prompt_that_does_not_extend_the_last_one_is_counted(kv):
    """A clock in the system prompt breaks the prefix at each call; the counter says so."""
    before = kv.stats()["counters"].get("prefix_broken", 0)
    with kv.task("t"):
        for minute in range(3):
            system = Message(role="system", content=f"It is 12:0{minute}. " + "You are careful. " * 20)
            kv.submit(Request(messages=(system, Message(role="user", content="Go on.")))).result(20)
    assert before + 2 == kv.stats()["counters"]["prefix_broken"]


def test_a_foreign_call_is_billed_and_counts_against_the_budget(kv):
    """A call that another client made is on the bill, and the next reservation sees it."""
    with kv.task("t", budget=Budget(tokens=100), final=False):
        kv.record_call(caller=kv.caller(), model="theirs", usage=Usage(input_tokens=90, output_tokens=10, calls=1))
        with pytest.raises(BudgetExceeded):
            kv.submit(ask("one more"))
    assert (1, 100) == (kv.report("t").usage.calls, kv.report("t").usage.total_tokens)


def test_a_foreign_call_is_stamped_with_its_start():
    """It is told when it has ended; the day it falls on, the timeline and the wall time go by its beginning."""
    clock = ManualClock(wall_ms=1_000_000)
    with AgentKV.with_engine(ScriptedEngine(["ok"]), clock=clock) as kv, kv.task("t", final=False):
        clock.advance(60.0)
        kv.record_call(caller=kv.caller(), model="theirs", usage=Usage(input_tokens=1, calls=1), total_s=10.0)
        bill = kv.report("t")
    assert (1_050_000, 60.0) == (bill.calls[0].at_ms, bill.spans.wall_s)


def test_a_task_without_an_outcome_is_of_the_type_that_it_was_given():
    """Abandoned: it is charged to the completed ones of its type, also where the type was told later."""
    with AgentKV.with_engine(ScriptedEngine(["ok"] * 3)) as kv:
        with kv.task("t", type="invoice"):
            kv.submit(ask("x")).result(20)
        with kv.task("late", final=False):
            pass
        with kv.task("late", type="invoice", final=False):
            pass
        assert ["invoice", "invoice"] == [kv.report(task).task_type for task in ("t", "late")]
        assert kv.report("late").completed is None


def test_what_is_not_saved_yet_is_in_the_stats(tmp_path, monkeypatch):
    """And no longer, once it is."""
    with AgentKV.with_engine(ScriptedEngine(["ok"]), ledger=f"sqlite:///{tmp_path}/l.sqlite") as kv:
        with monkeypatch.context() as patch:
            patch.setattr("agentkv.budget.database.Database.insert", _no_room)
            with kv.task("t"):
                pass
            assert 2 == kv.stats()["ledger"]["unsaved"]
        assert kv._books._ledger.store.flush(5)
        assert 0 == kv.stats()["ledger"]["unsaved"]


def _no_room(*_):
    raise LedgerError("no room")


def test_a_branch_waits_with_the_session_it_was_sent_from(kv):
    """A tool in a sent branch has no session of its own: the context that waits is its parent's."""
    with kv.task("t", final=False):
        answer = kv.submit(ask("x")).result(20)
    assert answer.session == last_session_of(kv.engine, Caller(task="t", branch="send:1|send:2"))
    assert last_session_of(kv.engine, Caller(task="other", branch="a|b")) is None


def test_a_call_without_max_tokens_may_write_what_is_left_of_the_budget(kv):
    """No limit of its own means no more than the task has, never the whole context."""
    request = Request(messages=(Message(role="user", content="hello"),))
    with kv.task("t", budget=Budget(tokens=6), final=False):
        kv.submit(request).result(20)
        sent = kv.engine.requests[-1]
        assert sent.sampling.max_tokens is not None
        assert sent.sampling.max_tokens + kv.engine.count_tokens(request) == 6
        assert kv.report("t").usage.total_tokens <= 6
        with pytest.raises(BudgetExceeded):
            kv.submit(ask("and a longer question that has many words in it", max_tokens=8))


def test_scopes_of_one_key_share_an_account_and_the_last_one_ends_the_task(kv):
    """A nested scope neither resets the budget nor destroys what the outer one still uses."""
    with kv.task("n", budget=Budget(model_calls=1)):
        with kv.task("n"):
            kv.submit(ask("x")).result(20)
        with pytest.raises(BudgetExceeded):
            kv.submit(ask("y"))
    late = kv._books.account("n")
    assert 1 == late.budget.model_calls
    assert 1 == late.used.model_calls


def test_a_new_scope_after_the_end_is_a_new_task_with_a_new_account(kv):
    """A key may be used again; what an earlier run spent is not held against it."""
    for _ in range(2):
        with kv.task("again", budget=Budget(model_calls=1)):
            kv.submit(ask("x")).result(20)


def test_scopes_that_end_in_another_order_leave_nobody_behind(kv):
    """Two generators in one context, each in its task: afterwards nobody is anybody."""

    def work(name):
        with kv.task(name, final=False):
            yield kv.caller().task
            yield kv.caller().task

    first, second = work("A"), work("B")
    assert ["A", "B"] == [next(first), next(second)]
    assert [] == list(first)[1:]
    assert "B" == next(second)
    list(second)
    assert "unattributed" == kv.caller().task


def test_tasks_that_nobody_finishes_do_not_pile_up(kv, monkeypatch):
    """Runs without a key of their own never come back: beyond a cap the longest idle is finished."""
    monkeypatch.setattr("agentkv.runtime.books.MAX_IDLE_TASKS", 5)
    for n in range(20):
        with kv.task(f"run-{n}", final=False):
            kv.submit(ask("x")).result(20)
    assert len(kv._books._open) <= 6
    assert "run-19" in kv._books._open


def test_a_finish_at_any_moment_never_reaches_the_agent(kv):
    """A hundred finishes beside a hundred calls: no KeyError comes out of submit or tool."""
    stop = threading.Event()

    def finish() -> None:
        while not stop.is_set():
            kv.finish("r")

    thread = threading.Thread(target=finish)
    thread.start()
    try:
        with kv.task("r", final=False):
            for _ in range(45):
                kv.submit(ask("x")).result(20)
                with kv.tool("t"):
                    pass
    finally:
        stop.set()
        thread.join()


def test_progress_of_any_type_is_ignored(kv):
    """Hints never raise into the tool."""
    with kv.task("t"), kv.tool("x") as call:
        call.progress(None)
        call.progress("0.4")


def test_a_log_that_cannot_be_written_breaks_nothing(monkeypatch):
    """A closed pipe behind the log is counted, nothing more."""

    def broken() -> None:
        raise BrokenPipeError

    monkeypatch.setattr(log, "get_logger", broken)
    log.warn_once("test_event_that_nobody_else_uses")
    log.failed("test_event")
    assert log.counters["log_failed"] >= 2


def test_a_requests_own_priority_stands(kv):
    """A background summary inside a foreground task is a background call."""
    with kv.task("t", priority=PriorityClass.FOREGROUND):
        kv.submit(Request(prompt="summary", priority=PriorityClass.BATCH)).result(20)
    assert PriorityClass.BATCH == kv.engine.requests[-1].priority


def test_two_unrelated_prompts_are_no_broken_prefix(kv):
    """Nodes with prompts of their own are ordinary, and calls of nobody are compared with nothing."""
    before = kv.stats()["counters"].get("prefix_broken", 0)
    with kv.task("t"):
        kv.submit(ask("Which test failed?")).result(20)
        kv.submit(ask("Which fruit is red?")).result(20)
    kv.submit(ask("x one")).result(20)
    kv.submit(ask("x two")).result(20)
    assert before == kv.stats()["counters"].get("prefix_broken", 0)


def test_messages_of_a_wrong_kind_are_refused_with_what_is_allowed(kv):
    """A typo in a role and a plain dict are misuse, told by name."""
    for messages in ("hello", ({"role": "user", "content": "x"},), (Message(role="usr", content="x"),)):
        with pytest.raises(RequestInvalid, match="system, user, assistant, tool"):
            Request(messages=messages)


SCRIPT = """
from agentkv import AgentKV, Request, ScriptedEngine
kv = AgentKV.with_engine(ScriptedEngine(["done"]), ledger=None)
with kv.task("forgotten"):
    kv.submit(Request(prompt="x")).result()
print("out", flush=True)
raise SystemExit(3)
"""


def test_a_program_that_forgets_to_close_keeps_its_bill_and_its_standard_output(tmp_path):
    """The ledger is flushed at exit, and warnings go to standard error."""
    env = {**os.environ, "AGENTKV_DATA": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert (3, "out\n") == (run.returncode, run.stdout)
    shown = subprocess.run(
        [sys.executable, "-m", "agentkv.cli", "report", "forgotten"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 model call" in shown.stdout, shown.stderr
