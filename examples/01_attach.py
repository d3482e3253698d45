"""One line for a graph that you do not want to touch: hints for its tools, and a bill of what its model used.

python examples/01_attach.py      # no model needed: a fake one stands in for yours

Where somebody else builds the graph, say the same with the call, and wrap nothing:

    from agentkv_langgraph import AgentKVCallback
    graph.invoke(state, {"configurable": {"thread_id": "ci-7"}, "callbacks": [AgentKVCallback(kv)]})
"""

from __future__ import annotations

import time

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from agentkv import AgentKV, ScriptedEngine


@tool
def run_tests(cmd: str) -> str:
    """Run the tests."""
    time.sleep(0.2)
    return f"{cmd}: 3 passed"


def your_graph():
    """A graph as you have it, without a word of agentkv."""
    call = {"name": "run_tests", "args": {"cmd": "pytest -q"}, "id": "call-1"}
    answers = [
        AIMessage("", tool_calls=[call], usage_metadata={"input_tokens": 60, "output_tokens": 12, "total_tokens": 72}),
        AIMessage("All tests pass.", usage_metadata={"input_tokens": 90, "output_tokens": 4, "total_tokens": 94}),
    ]
    model = GenericFakeChatModel(messages=iter(answers))
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [model.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([run_tests]))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    return graph.compile()


def main() -> None:
    with AgentKV.with_engine(ScriptedEngine([])) as kv:  # AgentKV.local() brings a model of its own
        app = kv.attach(your_graph())  # the one line
        state = app.invoke({"messages": [HumanMessage("Do the tests pass?")]}, {"configurable": {"thread_id": "ci-7"}})
        print(state["messages"][-1].text)
        print(kv.report("ci-7"))  # the thread is the task


if __name__ == "__main__":
    main()
