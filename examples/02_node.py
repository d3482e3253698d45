"""Decorated nodes of every kind: they behave as before, and their model calls say which node made them.

python examples/02_node.py --scripted     # no model needed
python examples/02_node.py                # with the embedded model
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Literal

from agentkv_langgraph import ChatAgentKV
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, RetryPolicy

from agentkv import AgentKV, ScriptedEngine


def connect() -> AgentKV:
    if "--scripted" in sys.argv:
        return AgentKV.with_engine(ScriptedEngine(itertools.repeat("Short and plain.")))
    return AgentKV.local(ledger="memory")


def main() -> None:
    with connect() as kv:
        model = ChatAgentKV(kv, max_tokens=20)

        @kv.node
        async def plan(state: MessagesState, config: RunnableConfig) -> Command[Literal["write", "check"]]:
            answer = await model.ainvoke(state["messages"], config)
            return Command(goto="write", update={"messages": [answer]})

        @kv.node(name="author")  # the name on the bill; by default the function's
        async def write(state: MessagesState):
            yield {"messages": [await model.ainvoke(state["messages"])]}

        class Check:
            async def __call__(self, state: MessagesState):
                return {"messages": [await model.ainvoke([*state["messages"], HumanMessage("Is it right?")])]}

        graph = StateGraph(MessagesState)
        graph.add_node("plan", plan, retry_policy=RetryPolicy())
        graph.add_node("write", write)
        graph.add_node("check", kv.node(Check()))
        graph.add_node("count", kv.node(RunnableLambda(lambda _: {"messages": [HumanMessage("Thanks.")]})))
        graph.add_edge(START, "plan")
        graph.add_edge("write", "check")
        graph.add_edge("check", "count")
        app = graph.compile()
        print(app.get_graph().draw_mermaid())  # the edges of plan's Command are there
        asyncio.run(
            app.ainvoke({"messages": [HumanMessage("Write a haiku.")]}, {"configurable": {"thread_id": "haiku"}})
        )
        for call in kv.report("haiku").calls:
            print(f"{call.node}: {call.usage.input_tokens} tokens in, {call.usage.cached_tokens} of them cached")


if __name__ == "__main__":
    main()
