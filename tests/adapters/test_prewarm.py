"""Prewarm: a waiting prompt is sent once more, shortly before its tool ends, and never where it would harm."""

from __future__ import annotations

import json
import threading
import time

import pytest

from agentkv import AgentKV, Budget, Message, Request, Sampling
from agentkv.adapters import prewarm as prewarm_module
from agentkv.adapters.prewarm import Plan, Prewarm, Prewarming, Wait
from agentkv.adapters.replay import Keep, Kept, Sending, shortened
from agentkv.adapters.strict import CHAT_FIELDS, StrictServer
from agentkv.clock import SystemClock
from agentkv.core.forecast import Forecast
from agentkv.core.hint import Hint, HintKind, SessionFacts, ToolFacts
from agentkv.core.usage import Usage
from agentkv.errors import BudgetExceeded
from agentkv.runtime.purse import TaskPurse

ABOUT = SessionFacts(session="s", task="t", tokens=2000, load_s=0.5, model="m")
PURPOSES = {"prewarm", "answer"}


def until(condition, seconds=20.0):
    ends = time.monotonic() + seconds
    while not condition() and time.monotonic() < ends:
        time.sleep(0.005)
    assert condition()


class Purse:
    """Pays out of `room` calls; notes what was paid."""

    def __init__(self, room=99):
        self.room, self.bills, self.open = room, [], 0

    def opens(self, task, model, usage):
        if self.room < 1:
            return None
        self.room -= 1
        self.open += 1

        def give_back():
            self.open -= 1

        return give_back

    def paid(self, about, usage, *, purpose, seconds, **said):
        self.bills.append((about.task, usage.input_tokens, purpose, said["status"]))


class Now:
    """A strategy that wants to send at once, `times` times; `why` keeps it from it."""

    def __init__(self, times=1, why=""):
        self.times, self.why = times, why

    def plan(self, wait, now_s):
        return Plan(due_s=now_s) if wait.calls and wait.sent < self.times else None

    def ready(self, wait, now_s):
        return self.why

    def sent(self, wait, began_s, seconds):
        pass

    def refused(self, wait):
        pass


class Posted:
    """A request as an HTTP library has it."""

    def __init__(self, url, body, headers=()):
        self.url, self._body, self.headers = url, json.dumps(body).encode(), dict(headers)

    def read(self):
        return self._body


def hint(kind, *, call="c", waits=(5.0, 6.0, 9.0)):
    tool = kind.startswith("tool")
    facts = ToolFacts(call_id=call, tool="pytest") if tool else None
    wait = Forecast(remaining_s=waits, n=9, source="history") if kind == "tool_start" else None
    return Hint(id="h", kind=HintKind(kind), at_s=0, ts_ms=0, task="t", session="s", call=facts, wait=wait, about=ABOUT)


@pytest.fixture
def server():
    with StrictServer(accepts=CHAT_FIELDS | {"id_slot"}) as made:
        yield made


@pytest.fixture
def made():
    """`made(strategy, purse)`: a Prewarm and the receipts that it wrote; closed at the end."""
    all_of_them = []

    def make(strategy, purse=None):
        receipts = []
        one = Prewarm(strategy=strategy, purse=purse or Purse(), clock=SystemClock(), note=receipts.append)
        one.receipts = receipts
        all_of_them.append(one)
        return one

    yield make
    for one in all_of_them:
        one.close()


def chat(server, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True, "id_slot": 1} | fields
    return Posted(f"{server.url}/chat/completions", body, {"authorization": "Bearer k", "content-length": "1"})


# -- when


def planned(waits, *, about=ABOUT, elapsed_s=0.0, now_s=100.0):
    wait = Wait(about=about, since_s=now_s - elapsed_s)
    wait.calls["c"] = (now_s - elapsed_s, Forecast(remaining_s=tuple(waits), n=9, source="history"))
    plan = Prewarming(busy=str).plan(wait, now_s)
    return None if plan is None else plan.due_s - now_s


def test_it_is_due_at_the_low_quantile_less_the_load_time():
    """Late is worth nothing, early only costs a little memory."""
    assert planned([20.0] * 10) == pytest.approx(19.5)
    assert planned([10.0, *[20.0] * 9]) == pytest.approx(18.5, abs=1.0)


def test_a_short_wait_is_left_alone():
    """What was used a second ago is still there."""
    assert planned([1.0, 1.2, 1.4]) is None


def test_a_wait_that_was_prewarmed_is_not_prewarmed_again():
    """However long it still takes."""
    wait = Wait(about=ABOUT, since_s=0.0, sent=1)
    wait.calls["c"] = (0.0, Forecast(remaining_s=(600.0,), n=9, source="history"))
    assert Prewarming(busy=str).plan(wait, 100.0) is None


def test_the_longest_of_several_tools_counts():
    """The session waits for the last of them."""
    wait = Wait(about=ABOUT, since_s=0.0)
    for call, seconds in (("a", 5.0), ("b", 60.0)):
        wait.calls[call] = (0.0, Forecast(remaining_s=(seconds,), n=9, source="history"))
    assert Prewarming(busy=str).plan(wait, 0.0).due_s == pytest.approx(59.5)


def test_nothing_is_known_of_a_context_nobody_saw():
    """No tokens, no plan."""
    assert planned([20.0], about=SessionFacts(session="s")) is None


def test_the_load_time_is_learnt_from_what_prewarms_took():
    """A guess, then what calls showed, then what was measured."""
    strategy = Prewarming(busy=str)
    assert 1.0 == strategy.load_s(SessionFacts(session="s", tokens=2000))
    assert 0.5 == strategy.load_s(ABOUT)
    strategy.took(1000, 2.0)
    assert 4.0 == strategy.load_s(ABOUT)


# -- what


def test_the_short_form_keeps_the_prompt_and_asks_for_one_token():
    """Not streamed, one choice; a provider's own way to ask for none goes instead."""
    kept = Kept.of(Posted("http://x/v1/chat/completions", {"messages": [1], "max_tokens": 50, "n": 2, "stream": True}))
    assert {"messages": [1], "max_tokens": 1, "stream": False} == json.loads(shortened(kept))
    kept = Kept.of(Posted("http://x/v1/messages", {"messages": [1], "max_tokens": 50}))
    assert 1 == json.loads(shortened(kept))["max_tokens"]
    assert 0 == json.loads(shortened(kept, fields={"max_tokens": 0}))["max_tokens"]
    kept = Kept.of(Posted("http://x/v1/responses", {"input": "x", "prompt_cache_options": {"ttl": "30m"}}))
    assert 1 == json.loads(shortened(kept))["max_output_tokens"]
    made = json.loads(shortened(kept, fields={"prompt_cache_options": {"prewarm": True}}))
    assert {"ttl": "30m", "prewarm": True} == made["prompt_cache_options"]
    assert "max_output_tokens" not in made
    kept = Kept.of(Posted("http://x/v1/chat/completions", {"max_completion_tokens": 50}))
    assert {"max_completion_tokens": 1, "stream": False} == json.loads(shortened(kept))


def test_requests_are_kept_for_few_sessions_and_never_large_ones():
    """They are prompts: in memory, bounded."""
    keep = Keep()
    for number in range(100):
        keep.put(f"s{number}", Posted("http://x/v1/chat/completions", {"n": number}))
    assert keep.get("s0") is None
    assert keep.get("s99") is not None
    keep.put("s99", Posted("http://x/", {"x": "a" * (5 * 2**20)}))
    assert keep.get("s99") is None


def test_it_is_sent_with_the_callers_own_headers(made, server):
    """Once, with the key, and a receipt."""
    purse = Purse()
    prewarm = made(Now(), purse)
    prewarm.keep.put("s", chat(server))
    prewarm.hear(hint("tool_start"))
    until(lambda: prewarm.receipts)
    (asked,) = server.asked
    assert ("Bearer k", 1, 1) == (asked.headers["authorization"], asked.body["max_tokens"], asked.body["id_slot"])
    assert ("prewarm", "applied") == (prewarm.receipts[0].kind, str(prewarm.receipts[0].outcome))
    assert [("t", "prewarm", "ok")] == [(task, purpose, status) for task, _, purpose, status in purse.bills]
    assert 0 == purse.open


@pytest.mark.parametrize(
    ("strategy", "purse", "words"), [(Now(why="3 requests wait"), Purse(), "3 requests"), (Now(), Purse(0), "budget")]
)
def test_it_is_left_out_where_it_would_harm(made, server, strategy, purse, words):
    """A busy server, an empty budget: nothing is sent, and the receipt says why."""
    prewarm = made(strategy, purse)
    prewarm.keep.put("s", chat(server))
    prewarm.hear(hint("tool_start"))
    until(lambda: prewarm.receipts)
    assert [] == server.asked
    assert words in prewarm.receipts[0].detail
    assert 0 == purse.open


def test_it_is_sent_once_in_a_wait(made, server):
    """An update of the forecast is no second one; the next wait is another."""
    prewarm = made(Now())
    prewarm.keep.put("s", chat(server))
    for _ in range(2):
        prewarm.hear(hint("tool_start"))
        until(lambda: prewarm.receipts)
        prewarm.hear(hint("tool_start", call="d"))
        time.sleep(0.05)
        assert 1 == len(prewarm.receipts)
        prewarm.receipts.clear()
        prewarm.hear(hint("turn_start"))
    assert 2 == len(server.asked)


def test_the_end_of_the_tool_breaks_it_off(made, server):
    """At once, though the server hangs: its place is free for the agent's own call."""
    server.fault = "hang"
    purse = Purse()
    prewarm = made(Now(), purse)
    prewarm.keep.put("s", chat(server))
    prewarm.hear(hint("tool_start"))
    until(lambda: server.asked)
    began_s = time.monotonic()
    prewarm.hear(hint("tool_end"))
    until(lambda: prewarm.receipts)
    assert time.monotonic() - began_s < 5
    assert ("advisory", True) == (str(prewarm.receipts[0].outcome), "broken off" in prewarm.receipts[0].detail)
    assert ["aborted"] == [status for *_, status in purse.bills]
    assert 0 == purse.open


def test_a_tool_that_ended_before_it_was_due_sends_nothing(made, server):
    """Nor does a session that is over."""
    prewarm = made(Prewarming(busy=str))
    prewarm.keep.put("s", chat(server))
    prewarm.hear(hint("tool_start", waits=(2.0, 2.1, 2.2)))
    prewarm.hear(hint("tool_end"))
    prewarm.hear(hint("session_end"))
    assert prewarm.keep.get("s") is None
    assert [] == server.asked


@pytest.mark.parametrize("fault", ["html", "close", "lie"])
def test_a_server_that_answers_nonsense_costs_a_receipt(made, server, fault):
    """Failed, or applied with an estimate; the thread lives on."""
    server.fault = fault
    prewarm = made(Now())
    prewarm.keep.put("s", chat(server))
    prewarm.hear(hint("tool_start"))
    until(lambda: prewarm.receipts)
    assert ("applied" if fault == "lie" else "failed") == str(prewarm.receipts[0].outcome)
    server.fault = ""
    prewarm.hear(hint("turn_start"))
    prewarm.hear(hint("tool_start"))
    until(lambda: len(prewarm.receipts) == 2)
    assert "applied" == str(prewarm.receipts[1].outcome)


def test_hearing_is_quick_while_one_is_on_its_way(made, server):
    """The agent's own thread hears hints: it waits for nobody."""
    server.fault = "hang"
    prewarm = made(Now())
    prewarm.keep.put("s", chat(server))
    prewarm.hear(hint("tool_start"))
    until(lambda: server.asked)
    began_s = time.perf_counter()
    for _ in range(500):
        prewarm.hear(hint("tool_update"))
    assert time.perf_counter() - began_s < 3


def test_a_request_that_is_cancelled_before_it_begins_is_not_sent(server):
    """The other order of the same race."""
    sending = Sending()
    sending.cancel()
    kept = Kept.of(chat(server))
    with pytest.raises(Exception, match="cancelled"):
        sending.run(kept, shortened(kept), 1.0)
    assert [] == server.asked


# -- the whole way


def test_an_agents_wait_is_prewarmed_and_billed(server, monkeypatch):
    """Through AgentKV: the prompt is sent again while the tool runs, with its price in the task's bill."""
    monkeypatch.setattr(prewarm_module, "SOONEST_S", 0.05)
    server.routes = {"GET /metrics": lambda _: (200, "none")}
    with AgentKV.remote(base_url=server.url, model="m", ledger="memory", api_key="k", prewarm=True) as kv:
        facts = []
        kv.on_fact(facts.append)
        with kv.task("a", final=False):
            prompt = (Message(role="user", content="hi " * 400),)
            kv.submit(Request(messages=prompt, sampling=Sampling(max_tokens=4))).result(20)
            with kv.tool("pytest", expect_s=4):
                until(lambda: "prewarm a: applied" in " ".join(kv.stats()["reach"]["last"]), 15)
        bill = kv.report("a")
    calls = [fact for fact in facts if hasattr(fact, "purpose")]
    assert ["answer", "prewarm"] == [call.purpose for call in calls]
    assert 2 == bill.usage.calls
    first, second = [asked for asked in server.asked if asked.path.endswith("completions")]
    assert first.body["messages"] == second.body["messages"]


def test_a_task_without_room_is_not_prewarmed(server, monkeypatch):
    """Its own next call would be refused for it."""
    monkeypatch.setattr(prewarm_module, "SOONEST_S", 0.05)
    with (
        AgentKV.remote(base_url=server.url, model="m", ledger="memory", api_key="k", prewarm=True) as kv,
        kv.task("a", final=False, budget=Budget(model_calls=1)),
    ):
        prompt = (Message(role="user", content="hi " * 400),)
        kv.submit(Request(messages=prompt, sampling=Sampling(max_tokens=4))).result(20)
        with kv.tool("pytest", expect_s=4):
            until(lambda: "budget" in str(kv.stats()["reach"]["last"]), 15)
    assert 1 == sum(asked.path.endswith("completions") for asked in server.asked)


def test_nothing_is_sent_where_nobody_asked_for_it(server):
    """Off unless told."""
    with (
        AgentKV.remote(base_url=server.url, model="m", ledger="memory", api_key="k") as kv,
        kv.task("a", final=False),
    ):
        kv.submit(Request(messages=(Message(role="user", content="hi"),))).result(20)
        with kv.tool("pytest", expect_s=0.8):
            time.sleep(0.1)
    assert not [thread for thread in threading.enumerate() if thread.name == "agentkv-prewarm"]


class Account:
    """Reserves where it has room; `held` is what is set aside."""

    def __init__(self, room):
        self.room, self.held = room, 0

    def reserve(self, tokens, *, usd):
        if not self.room:
            raise BudgetExceeded("no room", task="t", limit="tokens", allowed=0, used=0, asked=tokens)
        self.held += 1
        return self

    def release(self):
        self.held -= 1


@pytest.mark.parametrize(("room", "pool_room"), [(True, True), (True, False), (False, True)])
def test_both_budgets_must_have_room_and_get_back_what_they_set_aside(room, pool_room):
    """The task's, and that of all tasks of its type."""
    task, pool = Account(room), Account(pool_room)

    class TwoAccounts:
        worst_usd = staticmethod(lambda *_, **__: None)
        account = staticmethod(lambda _: task)

    TwoAccounts.pool = staticmethod(lambda _: pool)
    gives_back = TaskPurse(TwoAccounts()).opens("t", "m", Usage(input_tokens=5, calls=1))
    assert (room and pool_room) is (gives_back is not None)
    if gives_back is not None:
        assert (1, 1) == (task.held, pool.held)
        gives_back()
    assert (0, 0) == (task.held, pool.held)
