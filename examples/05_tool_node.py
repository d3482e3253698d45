"""A ToolNode of plain tools: hints and short outputs by two wrappers, without touching a tool.

python examples/05_tool_node.py
"""

from __future__ import annotations

from agentkv_langgraph import read_output_tool, tool_wrappers
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from agentkv import AgentKV, ScriptedEngine


@tool
def shell(cmd: str) -> str:
    """Run a command; this one only pretends."""
    return "\n".join(f"{cmd}: compiled module {number} in {number * 37 % 91} ms" for number in range(3000))


def main() -> None:
    with AgentKV.with_engine(ScriptedEngine([])) as kv:
        node = ToolNode([shell, read_output_tool(kv)], **tool_wrappers(kv))  # slim=False leaves outputs as they are
        graph = StateGraph(MessagesState)
        graph.add_node("tools", node)
        graph.add_edge(START, "tools")
        calls = [{"name": "shell", "args": {"cmd": f"make part-{n}"}, "id": f"call-{n}"} for n in range(2)]
        with kv.task("build"):
            state = graph.compile().invoke({"messages": [AIMessage("", tool_calls=calls)]})
        print(f"{len(shell.invoke({'cmd': 'make'}))} characters became {len(state['messages'][1].text)}:")
        print(state["messages"][1].text[:300], "...")
        print(kv.report("build"))


if __name__ == "__main__":
    main()
