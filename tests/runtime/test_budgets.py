"""What a task's budget does to its calls outside of any framework: closing turns, waits, notices, loops, types."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import threading
from decimal import Decimal

import pytest

from agentkv import AgentKV, Budget, BudgetExceeded, Message, QueueFull, Request, Sampling, ScriptedEngine
from agentkv.budget.prices import Price, PriceTable, Rates
from agentkv.core.hint import ToolStatus
from agentkv.errors import Closed, ConfigError, GenerationCancelled, LedgerError
from agentkv.log import counters

CENT_A_TOKEN = PriceTable([Price(model="scripted", rates=Rates(input=Decimal(10_000), output=Decimal(10_000)))])


def until_nobody_waits():
    """The threads of calls that waited for their budget have ended."""
    for thread in threading.enumerate():
        if thread.name == "agentkv-waits-for-budget":
            thread.join(10)


def asking(*said, tokens=4):
    """A call of at most `tokens` of output after a conversation."""
    messages = tuple(Message(role=("user", "assistant")[i % 2], content=text) for i, text in enumerate(said))
    return Request(messages=messages, sampling=Sampling(max_tokens=tokens))


class Hosted:
    """A model of somebody else, without tiers of ours."""

    def __init__(self, answers):
        inner = ScriptedEngine(answers, model="nobody-knows-this")
        self.model, self.submit, self.count_tokens = inner.model, inner.submit, inner.count_tokens
        self.stats, self.close = inner.stats, inner.close


@pytest.fixture
def kv():
    """A kv whose model always says yes."""
    with AgentKV.with_engine(ScriptedEngine(itertools.repeat("yes")), ledger="memory") as made:
        yield made


def test_a_closing_turn_says_what_was_said_last_and_costs_nothing(kv):
    """No model is asked; finish_reason is stop."""
    with kv.task("t", budget=Budget(model_calls=0, on_exceeded="finish"), final=False):
        answer = kv.submit(asking("why?", "Because of rounding.", "sure?")).result(20)
    assert ("budget", "stop", ()) == (answer.stopped_by, answer.finish_reason, answer.tool_calls)
    assert "Because of rounding." in answer.text
    assert (0, [], 0) == (answer.usage.total_tokens, kv.engine.requests, len(kv.report("t").calls))


@pytest.mark.parametrize("bad", [{"tokens": 5}, 5, "5", True], ids=repr)
def test_a_budget_that_is_none_is_refused(kv, bad):
    """Before the task begins, in words."""
    with pytest.raises(ConfigError, match="a Budget is needed"):
        kv.task("t", budget=bad)
    for name in ("budget", "budget_per"):
        with pytest.raises(ConfigError, match="a Budget is needed"):
            kv.budgets.limit("review", **{name: bad})


def test_an_interrupt_without_a_graph_raises(kv):
    """There is nobody to ask."""
    with kv.task("t", budget=Budget(model_calls=0, on_exceeded="interrupt")), pytest.raises(BudgetExceeded):
        kv.submit(asking("hi"))


async def test_a_call_in_the_queue_waits_for_a_grant_and_blocks_nothing(kv):
    """The event loop runs on; the call goes as soon as there is enough."""
    with kv.task("t", budget=Budget(model_calls=1, on_exceeded="queue"), final=False):
        await kv.submit(asking("one")).aresult()
        waiting = asyncio.create_task(kv.submit(asking("two")).aresult())
        for _ in range(3):
            await asyncio.sleep(0)
        assert not waiting.done()
        kv.budgets.grant("t", model_calls=1)
        assert (await waiting).text == "yes"
    assert len(kv.report("t").calls) == 2


def test_a_call_that_waits_too_long_is_refused_and_one_that_is_cancelled_is_gone(kv):
    """Neither holds anything afterwards."""
    short = Budget(tokens=0, on_exceeded="queue", wait_s=0.01)
    with kv.task("t", budget=short, final=False), pytest.raises(BudgetExceeded, match="Waited"):
        kv.submit(asking("one")).result(20)
    with kv.task("u", budget=Budget(tokens=0, on_exceeded="queue"), final=False):
        stream = kv.submit(asking("one"))
        stream.cancel()
        with pytest.raises(GenerationCancelled):
            stream.result(20)
        kv.budgets.grant("u", tokens=100)
        until_nobody_waits()
        assert kv.budgets.left("u") == {"tokens": 100}
    assert kv.engine.requests == []


def test_a_call_that_waits_ends_when_its_kv_is_closed():
    """Nobody hangs until the wait is over."""
    kv = AgentKV.with_engine(ScriptedEngine([]), ledger="memory")
    with kv.task("t", budget=Budget(tokens=0, on_exceeded="queue"), final=False):
        stream = kv.submit(asking("one"))
    kv.close()
    with pytest.raises(Closed):
        stream.result(20)


def test_a_grant_lets_a_task_go_on_that_was_over(kv):
    """Also one that was told to call no more tools."""
    with kv.task("t", budget=Budget(tool_calls=0, on_exceeded="finish"), final=False):
        for _ in range(2):
            with pytest.raises(BudgetExceeded), kv.tool("look"):
                pass
            last = kv.submit(asking("well?")).result(20)
        assert last.stopped_by == "budget"
        kv.budgets.grant("t", tool_calls=1)
        with kv.tool("look"):
            pass
        assert kv.submit(asking("well?")).result(20).text == "yes"


def test_a_new_budget_lets_a_task_go_on_that_was_over(kv):
    """In a later scope of the same key."""
    with kv.task("t", budget=Budget(tool_calls=0, on_exceeded="finish"), final=False):
        for _ in range(2):
            with pytest.raises(BudgetExceeded), kv.tool("look"):
                pass
            kv.submit(asking("well?")).result(20)
    with kv.task("t", budget=Budget(tool_calls=1), final=False):
        assert kv.submit(asking("well?")).result(20).text == "yes"


def test_the_soft_mark_is_told_once_at_the_tail_and_the_prompt_only_grows(kv):
    """The next prompt after it begins with the one that held the notice, byte for byte."""
    said = ["first question"]
    with kv.task("t", budget=Budget(model_calls=5, soft=0.5), final=False):
        for number in range(4):
            said.append(kv.submit(asking(*said)).result(20).text)
            said.append(f"question {number}")
    prompts = [[m.content for m in request.messages] for request in kv.engine.requests]
    told = [sum("[budget]" in text for text in prompt) for prompt in prompts]
    assert [0, 0, 0, 1] == told
    assert prompts[3][:5] == prompts[2]
    assert "60% of this task's model calls are used (3 of 5)" in prompts[3][-1]


def test_money_holds_with_a_price_and_not_without():
    """A cent a token: what a call costs at most must be left, and what it cost is spent. Without a price it is told once."""
    twenty_cents = Budget(usd="0.20")
    with (
        AgentKV.with_engine(ScriptedEngine(itertools.repeat("a b")), ledger="memory", prices=CENT_A_TOKEN) as kv,
        kv.task("t", budget=twenty_cents, final=False),
    ):
        kv.submit(asking("hi", tokens=2)).result(20)
        spent = kv.report("t").calls[0].cost_usd
        assert kv.budgets.left() == {"usd": Decimal("0.20") - spent}
        with pytest.raises(BudgetExceeded, match="usd"):
            kv.submit(asking("hi", tokens=50))
    before = counters["budget_without_price"]
    with AgentKV.with_engine(Hosted(["yes"]), ledger="memory") as kv, kv.task("t", budget=Budget(usd=0), final=False):
        assert kv.submit(asking("hi")).result(20).text == "yes"
    assert counters["budget_without_price"] == before + 1


def test_rounds_of_a_loop_are_capped_over_the_task_and_named_on_the_bill(kv):
    """Two reflections, then a refusal; each call inside says which loop it was in."""
    with kv.task("t", final=False):
        for _ in range(2):
            with kv.budgets.loop("reflection", limit=2):
                kv.submit(asking("better?")).result(20)
        loop = kv.budgets.loop("reflection", limit=2)
        assert not loop.allowed
        with pytest.raises(BudgetExceeded, match="reflection"), loop:
            pass
        kv.submit(asking("so?")).result(20)
    assert ["reflection", "reflection", ""] == [call.loop for call in kv.report("t").calls]


def test_a_round_too_many_of_a_task_that_finishes_is_a_closing_turn(kv):
    """The node goes on; its model calls are not made."""
    with kv.task("t", budget=Budget(retries=0, on_exceeded="finish"), final=False), kv.budgets.loop("retry"):
        assert kv.submit(asking("again")).result(20).stopped_by == "budget"


def test_tasks_of_a_type_wait_for_their_place_and_get_its_budget(kv):
    """One at once, none in the queue; what the type gives is the task's budget."""
    kv.budgets.limit("review", tasks=1, queue=0, budget_per=Budget(tokens=77))
    with kv.task("a", type="review"):
        assert kv.budgets.left() == {"tokens": 77}
    with kv.task("a", type="review", final=False):
        pass
    with kv.task("b", type="review"):
        place = kv.budgets.place("c", task_type="review", tenant="", priority=1)
        with kv.task("inside", type="review"):
            pass
        place.leave()


async def test_a_task_beyond_the_places_is_told_at_once(kv):
    """From another flow of control, sync or async."""
    kv.budgets.limit("review", tasks=1, queue=0)

    async def other():
        async with kv.task("b", type="review"):
            pass

    waits = asyncio.create_task(other())
    await waits
    with kv.task("a", type="review"):
        import contextvars

        with pytest.raises(QueueFull, match="1 tasks of type 'review' run and 0 wait"):
            contextvars.Context().run(kv.task("b", type="review").__enter__)


async def test_tasks_of_a_type_share_a_budget_and_wait_for_more(kv):
    """What is left for the type is left for each of its tasks; nobody steals."""
    kv.budgets.limit("review", budget=Budget(model_calls=1))
    with kv.task("a", type="review", final=False):
        await kv.submit(asking("one")).aresult()
    with kv.task("b", type="review", final=False):
        waiting = asyncio.create_task(kv.submit(asking("two")).aresult())
        await asyncio.sleep(0)
        assert not waiting.done()
        kv.budgets.grant("type:review", model_calls=1)
        await waiting
    assert (1, 1) == (len(kv.report("a").calls), len(kv.report("b").calls))


def test_what_a_call_did_not_use_goes_back_to_its_type_too(kv):
    """Settled in both accounts; a call that the engine refuses costs neither."""
    kv.budgets.limit("review", budget=Budget(tokens=1000))
    with kv.task("a", type="review", final=False):
        used = kv.submit(asking("one", tokens=500)).result(20).usage.total_tokens
        assert kv.budgets.left("type:review") == {"tokens": 1000 - used}
        with pytest.raises(BudgetExceeded), kv.task("a", type="review", budget=Budget(tokens=5), final=False):
            kv.submit(asking("two"))
        assert kv.budgets.left("type:review") == {"tokens": 1000 - used}


def test_a_call_that_waits_for_its_type_holds_nothing_of_its_task(kv):
    """What it set aside there is given back until there is room in both."""
    kv.budgets.limit("review", budget=Budget(model_calls=0))
    with kv.task("a", type="review", budget=Budget(tokens=100), final=False):
        stream = kv.submit(asking("one"))
        stream.cancel()
        until_nobody_waits()
        assert kv.budgets.left() == {"tokens": 100}


def test_a_summary_that_does_not_fit_is_left_out(kv):
    """A closing turn must not become what a history is folded into."""
    request = Request(messages=(Message(role="user", content="sum up"),), purpose="summary", as_is=True)
    with kv.task("t", budget=Budget(model_calls=0, on_exceeded="finish")), pytest.raises(BudgetExceeded):
        kv.submit(request)


def test_a_shared_budget_holds_over_two_programs(tmp_path):
    """Through the ledger's database; without one it is refused."""
    url = f"sqlite:///{tmp_path / 'ledger.sqlite'}"
    budget = Budget(model_calls=2, shared=True)
    for _ in range(2):
        with (
            AgentKV.with_engine(ScriptedEngine(itertools.repeat("yes")), ledger=url) as kv,
            kv.task("t", budget=budget),
        ):
            kv.submit(asking("hi")).result(20)
    with (
        AgentKV.with_engine(ScriptedEngine([]), ledger=url) as kv,
        kv.task("t", budget=budget),
        pytest.raises(BudgetExceeded, match="model_calls"),
    ):
        kv.submit(asking("hi"))
    with AgentKV.with_engine(ScriptedEngine([]), ledger="memory") as kv, pytest.raises(ConfigError, match="shared"):
        kv.task("t", budget=budget).__enter__()


def test_a_shared_budget_that_cannot_be_kept_refuses_before_anything_is_generated(tmp_path, monkeypatch):
    """The ledger's database is locked for good: a LedgerError, no model is asked; without `shared` the call is made."""
    monkeypatch.setattr("agentkv.budget.shared.WAIT_S", 0.05)
    file = tmp_path / "ledger.sqlite"
    with AgentKV.with_engine(ScriptedEngine(itertools.repeat("yes")), ledger=f"sqlite:///{file}") as kv:
        with kv.task("shared", budget=Budget(model_calls=5, shared=True), final=False):
            kv.submit(asking("go")).result(20)
            other = sqlite3.connect(file, isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            try:
                with pytest.raises(LedgerError, match="could not be used"):
                    kv.submit(asking("go"))
            finally:
                with kv.task("own", budget=Budget(model_calls=5)):
                    kv.submit(asking("go")).result(20)
                other.execute("ROLLBACK")
                other.close()
        assert 2 == len(kv.engine.requests)


async def test_a_types_tool_calls_are_those_of_all_its_tasks(kv):
    """Counted with the task and with the type; one that pauses, or does not fit into the type, counts with neither."""
    for key in ("one", "two"):
        kv.budgets.hold_to("review", kv._books.lasting_account("reviews", Budget(tool_calls=2)))
        ran = []
        with kv.task(f"{key}-a", type="review", budget=Budget(tool_calls=9), final=False), kv.tool("ls"):
            ran.append(1)
        with kv.task(f"{key}-b", type="review", budget=Budget(tool_calls=9, on_exceeded="queue"), final=False):
            kv.tool("ls").announce().end(ToolStatus.PAUSED)
            assert 1 == kv.budgets.left("type:review")["tool_calls"]
            async with kv.tool("ls"):
                ran.append(2)
            with pytest.raises(BudgetExceeded, match="'reviews' may spend 2 tool_calls"):
                if key == "one":
                    async with kv.tool("ls"):
                        ran.append(3)
                else:
                    with kv.tool("ls"):
                        ran.append(3)
        assert [1, 2] == ran
        assert (8, 8) == tuple(kv.budgets.left(f"{key}-{one}")["tool_calls"] for one in "ab")
