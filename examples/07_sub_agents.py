"""Sub-agents: as a node, behind a tool, sent side by side, in a thread: one bill, and a context of its own for each.

python examples/07_sub_agents.py --scripted     # no model needed
python examples/07_sub_agents.py                # with the embedded model
"""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

from agentkv_langgraph import ChatAgentKV
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send

from agentkv import AgentKV, ScriptedEngine


def connect() -> AgentKV:
    if "--scripted" in sys.argv:
        return AgentKV.with_engine(ScriptedEngine(itertools.repeat("Noted.")))
    return AgentKV.local(ledger="memory")


def main() -> None:
    with connect() as kv:
        model = ChatAgentKV(kv, max_tokens=15)

        def talk(state: MessagesState):
            return {"messages": [model.invoke(state["messages"])]}

        def agent(**options):
            graph = StateGraph(MessagesState)
            graph.add_node("talk", kv.node(talk))
            graph.add_edge(START, "talk")
            return graph.compile(**options)

        expert = agent(checkpointer=InMemorySaver())  # remembers, on a thread of its own

        @kv.node
        def lead(_: MessagesState):
            question = {"messages": [HumanMessage("What would an expert say?")]}
            expert.invoke(question, {"configurable": {"thread_id": "the expert"}})
            with ThreadPoolExecutor(1) as pool:  # a plain thread knows nothing of its task: carry it
                pool.submit(kv.carry(model.invoke), "And what does a thread say?").result()
            return {"messages": []}

        graph = StateGraph(MessagesState)
        graph.add_node("researcher", agent())
        graph.add_node("lead", lead)
        graph.add_node("worker", kv.node(talk))
        graph.add_edge(START, "researcher")
        graph.add_edge("researcher", "lead")
        parts = [Send("worker", {"messages": [HumanMessage(f"Part {number}.")]}) for number in range(3)]
        graph.add_conditional_edges("lead", lambda _: parts, ["worker"])
        config = {"configurable": {"thread_id": "report"}}
        graph.compile().invoke({"messages": [HumanMessage("Write a report.")]}, config)
        for call in kv.report("report").calls:
            print(f"{call.node} [{call.branch or 'main'}] session {call.session}")
        print(f"{kv.report('report').usage.calls} calls on one bill")


if __name__ == "__main__":
    main()
