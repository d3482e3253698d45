"""Steps that wait for their task's budget: tool calls, rounds and calls, in event loops and in threads."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import pytest

from agentkv import AgentKV, Budget, BudgetExceeded, Message, Request, Sampling, ScriptedEngine
from agentkv.errors import Closed


def until_nobody_waits():
    """The threads of steps that waited for their budget have ended."""
    for thread in threading.enumerate():
        if thread.name == "agentkv-waits-for-budget":
            thread.join(10)


def asking(said):
    return Request(messages=(Message(role="user", content=said),), sampling=Sampling(max_tokens=4))


@pytest.fixture
def kv():
    """A kv whose model always says yes."""
    with AgentKV.with_engine(ScriptedEngine(itertools.repeat("yes")), ledger="memory") as made:
        yield made


async def until(true):
    """Wait in the event loop until it is true."""
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110  nobody tells
            await asyncio.sleep(0.005)


async def test_a_tool_call_in_an_event_loop_waits_for_a_grant_and_blocks_nothing(kv):
    """The loop goes on while three calls wait; they are let in one for each grant, in order."""
    ran = []

    async def call(number):
        async with kv.tool("look"):
            ran.append(number)

    with kv.task("t", budget=Budget(tool_calls=0, on_exceeded="queue"), final=False):
        line = kv._books.account("t")._line("tools")
        tasks = []
        for number in range(3):
            tasks.append(asyncio.create_task(call(number)))
            await until(lambda: len(line) == len(tasks))
        for number in range(3):
            assert list(range(number)) == ran
            kv.budgets.grant("t", tool_calls=1)
            await until(lambda: len(ran) > number)  # noqa: B023
        await asyncio.gather(*tasks)
    assert 3 == kv._books.account("t").used.tool_calls


async def test_a_tool_call_that_waits_in_an_event_loop_can_be_given_up(kv):
    """Cancelled, it is not counted, not even where it was let in at that moment; too late, it raises."""

    async def call():
        async with kv.tool("look"):
            raise AssertionError("it must not run")

    with kv.task("t", budget=Budget(tool_calls=0, on_exceeded="queue", wait_s=0.1), final=False):
        with pytest.raises(BudgetExceeded, match="Waited"):
            await call()
        account = kv._books.account("t")
        account.budget = Budget(tool_calls=0, on_exceeded="queue")
        waits = asyncio.create_task(call())
        await until(lambda: len(account._line("tools")) == 1)
        waits.cancel()
        kv.budgets.grant("t", tool_calls=1)
        with pytest.raises(asyncio.CancelledError):
            await waits
        await until(lambda: not len(account._line("tools")))
        until_nobody_waits()
        assert 0 == account.used.tool_calls


async def test_a_round_in_an_event_loop_waits_for_a_grant(kv):
    """`async with` waits, `with` cannot and raises."""
    with kv.task("t", budget=Budget(retries=0, on_exceeded="queue"), final=False):
        loop = kv.budgets.loop("retry")
        with pytest.raises(BudgetExceeded), loop:
            pass

        async def round_of():
            async with loop:
                return (await asyncio.to_thread(kv.submit(asking("go")).result, 10)).text

        waits = asyncio.create_task(round_of())
        await until(lambda: len(kv._books.account("t")._line("roundsretry")) == 1)
        kv.budgets.grant("t", retries=1)
        assert "yes" == await waits
    assert (1, ["retry"]) == (kv._books.account("t").used.retries, [call.loop for call in kv.report("t").calls])


async def test_decorated_tools_and_tools_in_tools_wait_once(kv):
    """A coroutine under `kv.tool_function` waits as well; a scope inside it is a part of it."""

    @kv.tool_function
    async def look(place: str) -> str:
        async with kv.tool("inner"):
            return place

    with kv.task("t", budget=Budget(tool_calls=0, on_exceeded="queue"), final=False):
        waits = asyncio.create_task(look("here"))
        await until(lambda: len(kv._books.account("t")._line("tools")) == 1)
        kv.budgets.grant("t", tool_calls=1)
        assert "here" == await waits
    assert 1 == kv._books.account("t").used.tool_calls


def test_a_call_that_no_longer_fits_into_its_task_stops_waiting_for_its_type(kv):
    """The type has nothing left; meanwhile the task has nothing left either, and that one raises."""
    kv.budgets.limit("review", budget=Budget(model_calls=1))
    with kv.task("t", type="review", budget=Budget(model_calls=1), final=False):
        held = kv.budgets.pool("review").reserve(1)
        waits = kv.submit(asking("go"))
        account = kv._books.account("t")
        account.budget = Budget(model_calls=0)
        held.release()
        with pytest.raises(BudgetExceeded, match="task 't'"):
            waits.result(20)
    until_nobody_waits()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_tool_call_that_waits_ends_when_its_kv_is_closed(is_async):
    """Whoever waits is told, and does not wait out its time."""
    kv = AgentKV.with_engine(ScriptedEngine(["x"]), ledger="memory")
    ended = []

    async def within():
        async with kv.tool("look"):
            pass

    def run():
        with kv.task("t", budget=Budget(tool_calls=0, on_exceeded="queue"), final=False):
            try:
                if is_async:
                    asyncio.run(within())
                else:
                    with kv.tool("look"):
                        pass
            except Closed as error:
                ended.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not len(kv._books.account("t")._line("tools")):
        time.sleep(0.005)
    kv.close()
    thread.join(10)
    until_nobody_waits()
    assert 1 == len(ended)
