"""A LangGraph agent on the embedded engine: decorated nodes, a tool call that is told of, and the task's bill.

python examples/langgraph_agent.py              # real weights (SmolLM2-135M)
python examples/langgraph_agent.py --scripted   # no model, for a quick look
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from agentkv_langgraph import ChatAgentKV
from langchain_core.messages import HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from agentkv import AgentKV, Budget, ScriptedEngine


def build(kv: AgentKV) -> Any:
    model = ChatAgentKV(kv, max_tokens=40)

    @kv.node
    def look(_: MessagesState) -> dict[str, Any]:
        command = [sys.executable, "--version"]
        with kv.tool("shell", args={"cmd": "python --version"}):  # the context may leave the device while this runs
            output = subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603  fixed
        return {"messages": [HumanMessage(f"$ python --version\n{output}\nWhich version is it?")]}

    @kv.node
    def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node(look)
    graph.add_node(answer)
    graph.add_edge(START, "look")
    graph.add_edge("look", "answer")
    graph.add_edge("answer", END)
    return graph.compile()


def main() -> None:
    if "--scripted" in sys.argv:
        kv = AgentKV.with_engine(ScriptedEngine(["It is the version in the first line."]))
    else:
        kv = AgentKV.local("smollm2-135m", device_memory="64MiB", host_memory="256MiB", ledger="memory")
    with kv:
        with kv.task("version", budget=Budget(tokens=5_000)):
            state = build(kv).invoke({"messages": [("user", "You answer questions about this machine.")]})
        print(state["messages"][-1].text)
        print(kv.report("version"))


if __name__ == "__main__":
    main()
