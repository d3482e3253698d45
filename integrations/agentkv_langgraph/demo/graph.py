"""The agent: plan, run a tool, read its result, decide, report. An ordinary StateGraph with agentkv's decorator.

The history is append only, so the key-value cache of everything said so far stays valid from turn to turn, and the
model's time goes into what is new.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypedDict

from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command

from agentkv import AgentKV
from agentkv_langgraph.chat import ChatAgentKV
from agentkv_langgraph.demo.worklist import WorkItem


class State(TypedDict):
    """What the graph carries: the append-only history, the work that is left, and the last tool's output."""

    messages: Annotated[list[AnyMessage], add_messages]
    todo: list[WorkItem]
    done: list[WorkItem]
    output: str


def build_graph(kv: AgentKV, *, model: ChatAgentKV, run: Callable[[WorkItem], str]) -> Any:
    """The compiled graph. `run` runs a tool; what it prints is slimmed before it enters the state."""

    @kv.node
    def plan(state: State) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    @kv.node
    def run_tool(state: State) -> dict[str, Any]:
        item, *left = state["todo"]
        with kv.tool(item["tool"], args={"cmd": item["command"]}) as call:
            output = call.slim(run(item))
        return {"output": output, "todo": left, "done": [*state["done"], item]}

    @kv.node
    def read_result(state: State) -> dict[str, Any]:
        command = state["done"][-1]["command"]
        result = HumanMessage(f"$ {command}\n{state['output'] or '(no output)'}\n\nWhat does this tell us?")
        return {"messages": [result, model.invoke([*state["messages"], result])], "output": ""}

    @kv.node
    def decide(state: State) -> Command[Literal["run_tool", "report"]]:
        return Command(goto="run_tool" if state["todo"] else "report")

    @kv.node
    def report(state: State) -> dict[str, Any]:
        question = HumanMessage("The work list is done. Report what you found, the most important point first.")
        return {"messages": [question, model.invoke([*state["messages"], question])]}

    graph = StateGraph(State)
    for node in (plan, run_tool, read_result, decide, report):
        graph.add_node(node)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "run_tool")
    graph.add_edge("run_tool", "read_result")
    graph.add_edge("read_result", "decide")
    graph.add_edge("report", END)
    return graph.compile()


def first_state(*, instructions: str, goal: str, todo: list[WorkItem]) -> State:
    """The state that a task starts from: the same instructions for all tasks (their blocks are shared), then its goal."""
    steps = "\n".join(f"- {item['command']}" for item in todo)
    request = HumanMessage(
        f"{goal}\nThese commands will be run for you, one after another:\n{steps}\nSay how you will go about it."
    )
    return State(messages=[SystemMessage(instructions), request], todo=todo, done=[], output="")
