"""langchain's create_agent with one middleware: bill, hints for every tool call, short outputs.

python examples/06_create_agent.py --scripted     # no model needed
python examples/06_create_agent.py                # with the embedded model
"""

from __future__ import annotations

import sys

from agentkv_langgraph import AgentKVMiddleware, ChatAgentKV
from langchain.agents import create_agent
from langchain.agents.middleware import ToolRetryMiddleware
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool

from agentkv import AgentKV, ScriptedEngine, ToolCall


def connect() -> AgentKV:
    if "--scripted" in sys.argv:
        call = ToolCall(id="call-1", name="weather", arguments='{"city": "Lisbon"}')
        return AgentKV.with_engine(ScriptedEngine([call, "Sunny in Lisbon."]))
    return AgentKV.local(ledger="memory")


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"{city}: sunny, 24 degrees"


def main() -> None:
    with connect() as kv:
        agent = create_agent(
            ChatAgentKV(kv, max_tokens=60),  # or any other chat model: its calls are billed too
            [weather],
            middleware=[ToolRetryMiddleware(), AgentKVMiddleware(kv, read_output=True)],
        )
        answer = agent.invoke(
            {"messages": [HumanMessage("Weather in Lisbon?")]}, {"configurable": {"thread_id": "trip"}}
        )
        print(answer["messages"][-1].text)
        print(kv.report("trip"))


if __name__ == "__main__":
    main()
