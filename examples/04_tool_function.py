"""Tools that tell how long they take: decorated once, they are told, forecast and billed wherever they are called.

python examples/04_tool_function.py --scripted     # no model needed
python examples/04_tool_function.py                # with the embedded model
"""

from __future__ import annotations

import sys
import time

from agentkv_langgraph import ChatAgentKV
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from agentkv import AgentKV, ScriptedEngine, ToolCall


def connect() -> AgentKV:
    if "--scripted" in sys.argv:
        call = ToolCall(id="call-1", name="run_tests", arguments='{"cmd": "pytest -q", "timeout": 60}')
        return AgentKV.with_engine(ScriptedEngine([call, "All tests pass."]))
    return AgentKV.local(ledger="memory")


def main() -> None:
    with connect() as kv:

        @tool
        @kv.tool_function(expect_s=0.3)  # your estimate; afterwards it is learnt
        def run_tests(cmd: str, timeout: float = 60.0) -> str:
            """Run the tests."""
            for step in range(1, 4):
                time.sleep(0.1)
                kv.current_tool().progress(step / 3)  # from anywhere inside the tool
            return f"{cmd}: 3 passed in less than {timeout} s"

        kv.subscribe(lambda hint: hint.call and print(f"  {hint.kind}: {hint.call.tool} {hint.call.status}"))
        model = ChatAgentKV(kv, max_tokens=60).bind_tools([run_tests])
        graph = StateGraph(MessagesState)
        graph.add_node("model", kv.node(lambda state: {"messages": [model.invoke(state["messages"])]}))
        graph.add_node("tools", ToolNode([run_tests]))
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", tools_condition)
        graph.add_edge("tools", "model")
        with kv.task("fix-it"):
            answer = graph.compile().invoke({"messages": [HumanMessage("Run the tests.")]})
        print(answer["messages"][-1].text)
        print(kv.report("fix-it"))


if __name__ == "__main__":
    main()
