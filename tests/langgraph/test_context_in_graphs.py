"""The view at work under LangGraph: the graph's state stays whole, the model's prompts are slim and folded."""

from __future__ import annotations

import itertools
from typing import Annotated, TypedDict

import pytest
from agentkv_langgraph import ChatAgentKV, LangGraphHost
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode

from agentkv import AgentKV, Context, ScriptedEngine, ToolCall
from agentkv.engine.script import Reply

SUMMARY = "Goal: mend the app\nFacts:\n- the port is 6543\nOpen items:\n- run the tests"
SECRET = "Goal: mend"


class State(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


@tool
def look(at: str) -> str:
    """Look at something."""
    if at == "log":
        return "\n".join([*(f"10:{i % 60:02} handled request {i}" for i in range(2000)), "ERROR: port 6543 refused"])
    return "\n".join(f"{at} has {chr(97 + i % 26)}{i} = {i * 37 % 101}" for i in range(40))


def answers(steps: int, *, first: str = "log"):
    """Turns that call the tool, then an end."""
    for number in range(steps):
        arguments = f'{{ "at":"{first if number == 0 else f"file{number}"}"}}'
        yield Reply(
            text=f"I look, {number}.", tool_calls=(ToolCall(id=f"c{number}", name="look", arguments=arguments),)
        )
    while True:
        yield "All done."


class Script:
    """Answers calls of the agent in order; calls that ask for a summary get one."""

    def __init__(self, steps: int, *, first: str = "log") -> None:
        self._answers = answers(steps, first=first)

    def __call__(self, request):
        return SUMMARY if request.purpose == "summary" else next(self._answers)


@pytest.fixture
def make(request):
    """A graph of an agent and its tools over a scripted engine."""
    made: list[AgentKV] = []

    def make(steps: int, options: Context | None = None, *, saver=None, first: str = "log", **model_options):
        engine = ScriptedEngine(itertools.repeat(Script(steps, first=first)))
        kv = AgentKV.with_engine(engine, host=LangGraphHost(), context=options or Context())
        made.append(kv)
        model = ChatAgentKV(kv, **model_options).bind_tools([look])

        @kv.node
        def agent(state: State):
            return {"messages": [model.invoke(state["messages"])]}

        graph = StateGraph(State)
        graph.add_node("agent", agent)
        graph.add_node("tools", ToolNode([look]))
        graph.add_edge(START, "agent")
        graph.add_conditional_edges("agent", lambda state: "tools" if state["messages"][-1].tool_calls else END)
        graph.add_edge("tools", "agent")
        return kv, graph.compile(checkpointer=saver)

    yield make
    for kv in made:
        kv.close()


START_MESSAGES = {"messages": [SystemMessage("Be careful. " * 30), HumanMessage("Find out what is wrong.")]}


def prompts(kv: AgentKV):
    """What the model read, call by call."""
    return [request.messages for request in kv.engine.requests if request.purpose == "answer"]


def test_state_keeps_the_whole_output_and_the_model_reads_the_slim_one(make) -> None:
    """Slimming is a view: ToolMessages stay as the tool wrote them, turn after turn the same slim bytes are sent."""
    kv, graph = make(4)
    state = graph.invoke(START_MESSAGES, {"configurable": {"thread_id": "t"}})
    whole = next(message for message in state["messages"] if isinstance(message, ToolMessage))
    assert "handled request 1000" in whole.content
    sent = prompts(kv)
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(sent))
    assert "port 6543 refused" in sent[-1][3].content
    assert "handled request 1000" not in sent[-1][3].content
    assert '{ "at":"log"}' == sent[-1][2].tool_calls[0].arguments, "byte for byte as the model wrote it"
    assert 1 == kv.report("t").shaping.slimmed


@pytest.mark.parametrize("mode", ["messages", "updates", "values"])
def test_a_summary_is_never_seen_in_a_users_stream(make, mode) -> None:
    """It is billed to the task all the same."""
    kv, graph = make(12, Context(soft_mark=1500), first="file")
    shown = repr(list(graph.stream(START_MESSAGES, {"configurable": {"thread_id": "t"}}, stream_mode=mode)))
    bill = kv.report("t")
    assert bill.shaping.folds >= 1
    assert SECRET not in shown
    assert any(call.purpose == "summary" and call.task == "t" for call in bill.calls)


def test_a_resume_from_a_checkpoint_in_another_process_sends_the_same_bytes(make, tmp_path) -> None:
    """The thread goes on from what the checkpointer holds: the fold is found, nothing is summarised again."""
    saver = InMemorySaver()
    config = {"configurable": {"thread_id": "t"}}
    options = Context(soft_mark=1500, folder=tmp_path)
    kv, graph = make(12, options, saver=saver, first="file")
    graph.invoke(START_MESSAGES, config)
    last = prompts(kv)[-1]
    kv.close()
    again, resumed = make(0, options, saver=saver)
    resumed.invoke({"messages": [HumanMessage("And now?")]}, config)
    first = prompts(again)[0]
    assert last == first[: len(last)]
    assert 0 == again.report("t").shaping.summary_tokens


def test_a_model_that_opts_out_sends_everything(make) -> None:
    """By the model's argument."""
    kv, graph = make(3, first="log")
    plain, plain_graph = make(3, Context(), first="log", context=False)
    graph.invoke(START_MESSAGES, {"configurable": {"thread_id": "t"}})
    plain_graph.invoke(START_MESSAGES, {"configurable": {"thread_id": "t"}})
    assert "handled request 1000" in prompts(plain)[-1][3].content
    assert len(prompts(kv)[-1][3].content) < len(prompts(plain)[-1][3].content)
