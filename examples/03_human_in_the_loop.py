"""A person is asked in the middle of a tool: the wait is told, nothing is billed twice, and the prompt goes on.

python examples/03_human_in_the_loop.py --scripted     # no model needed
python examples/03_human_in_the_loop.py                # with the embedded model
"""

from __future__ import annotations

import sys

from agentkv_langgraph import ChatAgentKV
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from langgraph.types import Command, interrupt

from agentkv import AgentKV, ScriptedEngine, ToolCall


def connect() -> AgentKV:
    if "--scripted" in sys.argv:
        call = ToolCall(id="call-1", name="deploy", arguments='{"to": "production"}')
        return AgentKV.with_engine(ScriptedEngine([call, "It is deployed."]))
    return AgentKV.local(ledger="memory")


def main() -> None:
    with connect() as kv:

        @tool
        def deploy(to: str) -> str:
            """Deploy the release."""
            with kv.tool("deploy", args={"to": to}):
                answer = interrupt(f"May I deploy to {to}?")  # everything before this line runs again
                return f"deployed to {to}" if answer == "yes" else f"a person said: {answer}"

        kv.subscribe(lambda hint: hint.call and print(f"  {hint.kind}: {hint.call.tool} {hint.call.status}"))
        model = ChatAgentKV(kv, max_tokens=60).bind_tools([deploy])
        graph = StateGraph(MessagesState)
        graph.add_node("agent", kv.node(lambda state: {"messages": [model.invoke(state["messages"])]}))
        graph.add_node("tools", kv.node(ToolNode([deploy])))
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", tools_condition)
        graph.add_edge("tools", "agent")
        app = graph.compile(checkpointer=InMemorySaver())  # or SQLite, or PostgreSQL
        config = {"configurable": {"thread_id": "release-9"}}
        state = app.invoke({"messages": [HumanMessage("Deploy, please.")]}, config)
        while "__interrupt__" in state:
            print(state["__interrupt__"][0].value)
            state = app.invoke(Command(resume="yes"), config)  # tomorrow, in another process, if you like
        print(state["messages"][-1].text)
        print(kv.report("release-9"))


if __name__ == "__main__":
    main()
