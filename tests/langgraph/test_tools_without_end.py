"""Tools that are cancelled, or never come back: the wait goes down by itself, and the next turn is a valid prompt."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import blockbuster
import pytest
from agentkv_langgraph import AgentKVMiddleware, ChatAgentKV, tool_wrappers
from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from agentkv import ToolCall
from agentkv.clock import ManualClock
from agentkv.core.hint import ToolStatus
from agentkv.core.residency import Tier
from agentkv.engine.script import Reply
from agentkv.policy import ladder

CONFIG = {"configurable": {"thread_id": "t"}}
CALLS = Reply(tool_calls=tuple(ToolCall(id=f"call-{n}", name="shell", arguments='{"cmd": "ls"}') for n in range(2)))


def agent_of(kv: Any, shell: Any) -> Any:
    """An agent of two nodes, decorated and told of its tools."""
    model = ChatAgentKV(kv).bind_tools([shell])

    @kv.node
    async def agent(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode([shell], **tool_wrappers(kv)))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition, ["tools", END])
    graph.add_edge("tools", "agent")
    return graph.compile(checkpointer=InMemorySaver())


async def test_the_turn_after_a_cancelled_tool_is_a_valid_prompt_and_nothing_waits(make_kv, block_engine) -> None:
    """Both calls are told once as cancelled, their session waits for no tool, and each call has a result when it is sent."""
    kv = make_kv(engine=block_engine([CALLS, "done"]))
    hints: list[Any] = []
    kv.subscribe(hints.append)
    begun = asyncio.Event()

    @tool
    async def shell(cmd: str) -> str:
        """Run."""
        begun.set()
        await asyncio.sleep(60)
        return cmd

    app = agent_of(kv, shell)
    run = asyncio.create_task(app.ainvoke({"messages": [HumanMessage("go")]}, CONFIG))
    await begun.wait()
    await asyncio.sleep(0.01)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    told = [(hint.call.call_id, hint.call.status) for hint in hints if hint.call is not None]
    expected = [(f"call-{n}", status) for n in range(2) for status in (ToolStatus.CANCELLED, ToolStatus.RUNNING)]
    assert sorted(expected) == sorted(told)
    assert [{}] == [wait.calls for wait in kv._planner._waits.values()]

    await app.ainvoke({"messages": [HumanMessage("and now?")]}, CONFIG)
    sent = kv.engine.requests[-1].messages
    assert ["user", "assistant", "tool", "tool", "user"] == [message.role for message in sent]
    assert ["call-0", "call-1"] == [message.tool_call_id for message in sent if message.role == "tool"]


def test_a_tool_that_never_returns_lets_its_context_go_down_and_may_still_return(make_kv, block_engine) -> None:
    """After a day the context is on disk, the call is overdue, no thread waits; its late end is an end like any other."""
    clock = ManualClock(100.0)
    policy = ladder(keep_s=1.0, host_s=60.0, drop_tokens=0)
    kv = make_kv(engine=block_engine([CALLS, "done"]), clock=clock, policy=policy)
    kv._planner._threaded = False  # the test is the planner's thread
    begun, release = threading.Semaphore(0), threading.Event()

    @tool
    def shell(cmd: str) -> str:
        """Run."""
        begun.release()
        release.wait(30)
        return cmd

    answers: list[Any] = []
    app = agent_of(kv, shell)
    given = {"messages": [HumanMessage("go " * 200)]}
    run = threading.Thread(target=lambda: answers.append(asyncio.run(app.ainvoke(given, CONFIG))))
    run.start()
    try:
        assert begun.acquire(timeout=10)
        assert begun.acquire(timeout=10)
        (session,) = kv._planner._waits
        for _ in range(200):
            clock.advance(86_400 / 200)
            kv._planner.tick()
        assert Tier.DISK in {move.to for move in kv.engine.moves if move.session == session}
        wait = kv._planner._waits[session]
        assert wait.forecast.after(clock.now_s() - wait.base_s).overdue
        assert len(kv._planner._heap) <= 2
    finally:
        release.set()
        run.join(10)
    assert "done" == answers[0]["messages"][-1].text
    assert ["succeeded"] * 2 == [call.status for call in kv.report("t").tools]
    assert [86_400] * 2 == [round(call.actual_s) for call in kv.report("t").tools]


@pytest.mark.parametrize("kind", ["graph", "create_agent"])
def test_an_async_agent_never_blocks_its_event_loop(make_kv, kind, tmp_path) -> None:
    """With a ledger on disk, hints, slimming, the callback attached: nothing of ours reads, writes, sleeps or waits there."""
    kv = make_kv([CALLS, "done"], ledger=f"sqlite:///{tmp_path / 'ledger.db'}")
    kv.subscribe(lambda _hint: None)

    @tool
    async def shell(cmd: str) -> str:
        """Run."""
        await asyncio.sleep(0.01)
        return "line\n" * 5000

    ours = create_agent(ChatAgentKV(kv), [shell], middleware=[AgentKVMiddleware(kv)], checkpointer=InMemorySaver())
    app = kv.attach(agent_of(kv, shell) if kind == "graph" else ours)
    given = {"messages": [HumanMessage("go")]}
    with blockbuster.blockbuster_ctx(["agentkv", "agentkv_langgraph"]):
        answer = asyncio.run(app.ainvoke(given, CONFIG))
    assert "done" == answer["messages"][-1].text
    assert (2, 2) == (kv.report("t").usage.calls, len(kv.report("t").tools))
