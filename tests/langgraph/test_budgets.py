"""Budgets in graphs: a refusal surfaces from everywhere, an agent ends well, a person is asked, branches share."""

from __future__ import annotations

import asyncio
import itertools
import operator
from typing import Annotated, TypedDict

import pytest
from agentkv_langgraph import BudgetStop, ChatAgentKV, LangGraphHost, tool_wrappers
from langchain_core.language_models.fake_chat_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AnyMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.prebuilt import ToolNode
from langgraph.types import Command, RetryPolicy, Send

from agentkv import AgentKV, Budget, BudgetExceeded, Context, ScriptedEngine
from agentkv.context.memory import Memory
from agentkv.core.message import ToolCall
from agentkv.engine.scripted import Reply
from agentkv.log import counters


class Talk(TypedDict):
    messages: Annotated[list[AnyMessage], add_messages]


@tool
def look(place: str) -> str:
    """Look somewhere."""
    return f"nothing in {place}"


def asks(number, calls=1):
    """An answer that calls the tool so many times."""
    return Reply(
        text=f"step {number}",
        tool_calls=tuple(
            ToolCall(id=f"c{number}-{i}", name="look", arguments='{"place": "here"}') for i in range(calls)
        ),
    )


def agent(kv, tools=None, saver=None):
    """The usual loop of a model and its tools."""
    model = ChatAgentKV(kv, max_tokens=200).bind_tools([look])
    graph = StateGraph(Talk)
    graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]}, retry_policy=RetryPolicy())
    graph.add_node("tools", tools or ToolNode([look], **tool_wrappers(kv)))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", lambda s: "tools" if s["messages"][-1].tool_calls else END)
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=saver)


@pytest.fixture
def make():
    """A kv over answers; closed at the end."""
    opened = []

    def of(answers, **options):
        opened.append(AgentKV.with_engine(ScriptedEngine(answers), host=LangGraphHost(), ledger="memory", **options))
        return opened[-1]

    yield of
    for kv in opened:
        kv.close()


def valid(messages):
    """Every tool call has its result."""
    asked = [call["id"] for m in messages if isinstance(m, AIMessage) for call in m.tool_calls]
    return asked == [m.tool_call_id for m in messages if isinstance(m, ToolMessage)]


def test_a_finished_agent_ends_with_a_partial_answer_and_a_valid_history(make):
    """The third model call is not made: its turn is a closing one, with what was said last."""
    kv = make(asks(i) for i in itertools.count())
    with kv.task("t", budget=Budget(model_calls=2, on_exceeded="finish"), final=False):
        end = agent(kv).invoke({"messages": [HumanMessage("go")]})["messages"]
    assert valid(end)
    assert end[-1].response_metadata["agentkv"]["stopped_by"] == "budget"
    assert "step 1" in end[-1].text
    assert (end[-1].tool_calls, len(kv.report("t").calls)) == ([], 2)


def test_what_a_budget_puts_into_a_checkpoint_is_plain(make, monkeypatch):
    """A closing turn and a refused tool's result are read back under LangGraph's strictest serialiser."""
    monkeypatch.setenv("LANGGRAPH_STRICT_MSGPACK", "true")
    kv = make(asks(i) for i in itertools.count())
    app = agent(kv, saver=InMemorySaver())
    config = {"configurable": {"thread_id": "t"}}
    with kv.task("t", budget=Budget(tool_calls=1, model_calls=3, on_exceeded="finish"), final=False):
        end = app.invoke({"messages": [HumanMessage("go")]}, config)["messages"]
    assert app.get_state(config).values["messages"] == end
    assert end[-1].response_metadata["agentkv"]["stopped_by"] == "budget"


def test_of_eight_tool_calls_six_run_and_all_have_results(make):
    """The two that the budget refuses answer that they did not run; the model may answer, and calls no more tools."""
    kv = make([asks(0, calls=8), "done"])
    with kv.task("t", budget=Budget(tool_calls=6, on_exceeded="finish"), final=False):
        end = agent(kv).invoke({"messages": [HumanMessage("go")]})["messages"]
    results = [m for m in end if isinstance(m, ToolMessage)]
    assert (8, 2) == (len(results), sum("Not run" in m.text for m in results))
    assert (end[-1].text, valid(end), len(kv.report("t").tools)) == ("done", True, 6)


def test_an_agent_that_goes_on_calling_refused_tools_ends(make):
    """It is told once; when it calls again, the next turn is the closing one."""
    kv = make(asks(i) for i in itertools.count())
    with kv.task("t", budget=Budget(tool_calls=1, on_exceeded="finish"), final=False):
        end = agent(kv).invoke({"messages": [HumanMessage("go")]}, {"recursion_limit": 30})["messages"]
    assert end[-1].response_metadata["agentkv"]["stopped_by"] == "budget"
    assert len(kv.report("t").calls) == 3


def test_a_refusal_in_a_node_is_neither_retried_nor_swallowed(make):
    """LangGraph's default retry leaves it alone; the caller of the graph gets it."""
    kv = make(asks(i) for i in itertools.count())
    with kv.task("t", budget=Budget(model_calls=1)), pytest.raises(BudgetExceeded, match="model_calls"):
        agent(kv).invoke({"messages": [HumanMessage("go")]})


@pytest.mark.parametrize("handle", [True, False])
def test_a_refusal_in_a_tool_surfaces_through_a_node_that_handles_errors(make, handle):
    """`handle_tool_errors=True` turns what a tool raises into a message, but not this."""
    kv = make(asks(i) for i in itertools.count())

    @tool
    def look(place: str) -> str:
        """A sub-agent."""
        return ChatAgentKV(kv, max_tokens=20).invoke(place).text

    with kv.task("t", budget=Budget(model_calls=1)), pytest.raises(BudgetStop, match="model_calls"):
        agent(kv, ToolNode([look], handle_tool_errors=handle)).invoke({"messages": [HumanMessage("go")]})


def test_a_task_that_raised_is_over_even_where_a_tool_swallowed_it(make):
    """A tool that catches everything only puts it off to the next step of the task."""
    kv = make(asks(i) for i in itertools.count())
    seen = []

    @tool
    def look(place: str) -> str:
        """A careless sub-agent."""
        try:
            return ChatAgentKV(kv, max_tokens=900).invoke(place).text
        except Exception as error:
            seen.append(error)
            return "failed"

    with kv.task("t", budget=Budget(tokens=800)), pytest.raises(BudgetExceeded):
        agent(kv, ToolNode([look])).invoke({"messages": [HumanMessage("go")]})
    assert len(seen) == 1


def test_a_refusal_surfaces_from_a_subgraph(make):
    """From the graph inside a node of another one."""
    kv = make(asks(i) for i in itertools.count())
    outer = StateGraph(Talk)
    outer.add_node("inner", agent(kv), retry_policy=RetryPolicy())
    outer.add_edge(START, "inner")
    with kv.task("t", budget=Budget(model_calls=1)), pytest.raises(BudgetExceeded):
        outer.compile().invoke({"messages": [HumanMessage("go")]})


def test_a_decorated_node_of_a_task_that_is_over_does_not_run(make):
    """Also one that calls no model."""
    kv = make(["one"])
    ran = []

    def careless(_state):
        model = ChatAgentKV(kv)
        for _ in range(2):
            try:
                model.invoke("hello")
            except BudgetExceeded:
                continue
        return {"messages": ["went on"]}

    graph = StateGraph(Talk)
    graph.add_node("careless", careless)
    graph.add_node("after", kv.node(lambda state: ran.append(state) or {}))
    graph.add_edge(START, "careless")
    graph.add_edge("careless", "after")
    with kv.task("t", budget=Budget(model_calls=1)), pytest.raises(BudgetExceeded):
        graph.compile().invoke({"messages": [HumanMessage("go")]})
    assert ran == []


def test_a_model_of_somebody_else_is_stopped_by_the_callback(make):
    """With nothing left, a call that does not go through us is refused before it is made."""
    kv = make(["one"])
    theirs = GenericFakeChatModel(messages=iter(["a", "b"]))
    graph = StateGraph(Talk)
    graph.add_node("model", lambda state: {"messages": [theirs.invoke(state["messages"])]})
    graph.add_edge(START, "model")
    app = kv.attach(graph.compile())
    with kv.task("t", budget=Budget(model_calls=1)):
        app.invoke({"messages": [HumanMessage("go")]})
        with pytest.raises(BudgetExceeded):
            app.invoke({"messages": [HumanMessage("go")]})


def test_an_interrupt_resumes_with_a_bigger_budget(make):
    """Asked twice, granted twice, each answer once; what a person is asked is plain JSON."""
    kv = make(["first", "second", *(f"again {i}" for i in range(9))])
    runs = []

    def node(state):
        runs.append(len(kv.report("thread").calls))
        model = ChatAgentKV(kv, max_tokens=20)
        return {"messages": [model.invoke(state["messages"]), model.invoke(state["messages"])]}

    graph = StateGraph(Talk)
    graph.add_node("node", node)
    graph.add_edge(START, "node")
    app = graph.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "thread"}}
    with kv.task("thread", budget=Budget(model_calls=0, on_exceeded="interrupt"), final=False):
        asked = app.invoke({"messages": [HumanMessage("go")]}, config)["__interrupt__"][0].value
        assert (asked["agentkv"], asked["limit"], asked["allowed"]) == ("budget", "model_calls", 0)
        again = app.invoke(Command(resume={"model_calls": 1}), config)
        assert again["__interrupt__"][0].value["allowed"] == 1
        end = app.invoke(Command(resume={"model_calls": 2}), config)
        assert "__interrupt__" not in end
        assert (3, 0) == (len(kv.report("thread").calls), kv.budgets.left("thread")["model_calls"])
    assert len(runs) == 3


def test_a_call_that_has_to_be_prepared_first_is_asked_for_too(make):
    """Where a memory is looked up, the call is sent from another thread; the question reaches the graph all the same."""
    with Memory() as memory:
        kv = make(["fine"], context=Context(memory=memory))
        app = agent(kv, saver=InMemorySaver())
        config = {"configurable": {"thread_id": "x"}}
        with kv.task("x", budget=Budget(model_calls=0, on_exceeded="interrupt"), final=False):
            asked = app.invoke({"messages": [HumanMessage("go")]}, config)
            assert asked["__interrupt__"][0].value["limit"] == "model_calls"
            end = app.invoke(Command(resume=1), config)
        assert end["messages"][-1].text == "fine"


async def test_a_tool_call_is_asked_for_too_in_async_graphs(make):
    """The tool runs after the grant, once, and the agent goes on to its end."""
    kv = make([asks(0), "done"])
    app = agent(kv, saver=InMemorySaver())
    config = {"configurable": {"thread_id": "x"}}
    with kv.task("x", budget=Budget(tool_calls=0, on_exceeded="interrupt"), final=False):
        asked = await app.ainvoke({"messages": [HumanMessage("go")]}, config)
        assert asked["__interrupt__"][0].value["limit"] == "tool_calls"
        end = await app.ainvoke(Command(resume=1), config)
    assert (end["messages"][-1].text, valid(end["messages"]), len(kv.report("x").tools)) == ("done", True, 1)


async def test_an_async_model_call_is_asked_for(make):
    """From within the event loop."""
    kv = make(["fine"])
    graph = StateGraph(Talk)

    async def node(state):
        return {"messages": [await ChatAgentKV(kv, max_tokens=9).ainvoke(state["messages"])]}

    graph.add_node("node", node)
    graph.add_edge(START, "node")
    app = graph.compile(checkpointer=InMemorySaver())
    config = {"configurable": {"thread_id": "x"}}
    with kv.task("x", budget=Budget(tokens=0, on_exceeded="interrupt"), final=False):
        await app.ainvoke({"messages": [HumanMessage("go")]}, config)
        end = await app.ainvoke(Command(resume={"tokens": 100}), config)
    assert end["messages"][-1].text == "fine"


def test_an_interrupt_that_is_declined_ends_the_agent(make):
    """False is an answer: the closing turn."""
    kv = make(["never"])
    app = agent(kv, saver=InMemorySaver())
    config = {"configurable": {"thread_id": "x"}}
    with kv.task("x", budget=Budget(model_calls=0, on_exceeded="interrupt"), final=False):
        app.invoke({"messages": [HumanMessage("go")]}, config)
        end = app.invoke(Command(resume=False), config)["messages"][-1]
    assert end.response_metadata["agentkv"]["stopped_by"] == "budget"


class Fan(TypedDict):
    done: Annotated[list[str], operator.add]


@pytest.mark.parametrize("use_async", [False, True])
async def test_fifty_branches_with_a_budget_for_three_calls(make, use_async):
    """Sent branches, all at once, each under a decorated node: three calls, no token too many, no state conflict."""
    kv = make(itertools.repeat("ok"))
    model = ChatAgentKV(kv, max_tokens=5)

    def branch(state):
        return {"done": [model.invoke("say ok").text]}

    async def abranch(state):
        return {"done": [(await model.ainvoke("say ok")).text]}

    graph = StateGraph(Fan)
    graph.add_node("branch", kv.node(abranch if use_async else branch))
    graph.add_conditional_edges(START, lambda _: [Send("branch", {"done": []}) for _ in range(50)], ["branch"])
    app = graph.compile()
    with kv.task("t", budget=Budget(model_calls=3, tokens=1000, on_exceeded="finish"), final=False):
        end = await app.ainvoke({"done": []}) if use_async else app.invoke({"done": []})
    assert (50, 3) == (len(end["done"]), len(kv.report("t").calls))
    assert end["done"].count("ok") == 3


async def test_tool_calls_of_an_async_graph_wait_for_a_grant(make):
    """Six calls of one answer are granted one by one while they wait; the loop is not blocked."""
    kv = make(itertools.chain([asks(0, calls=6)], itertools.repeat("done")))
    granted = []

    async def granting():
        line = kv._books.account("t")._line("tools")
        while len(granted) < 6:
            await asyncio.sleep(0.005)
            if len(line):
                kv.budgets.grant("t", tool_calls=1)
                granted.append(1)

    with kv.task("t", budget=Budget(tool_calls=0, on_exceeded="queue"), final=False):
        grants = asyncio.create_task(granting())
        end = await agent(kv).ainvoke({"messages": [HumanMessage("go")]})
        await grants
    assert valid(end["messages"])
    assert 6 == sum(message.text == "nothing in here" for message in end["messages"])


def test_retried_nodes_count_against_retries(make):
    """A node's second and third attempt are two retries; a third is refused, and that is not retried itself."""
    kv = make(itertools.repeat("ok"))
    attempts = []

    def flaky(state):
        attempts.append(1)
        ChatAgentKV(kv, max_tokens=5).invoke("hello")
        raise ConnectionError("down")

    graph = StateGraph(Talk)
    policy = RetryPolicy(max_attempts=9, initial_interval=0.0, jitter=False)
    graph.add_node("flaky", flaky, retry_policy=policy)
    graph.add_edge(START, "flaky")
    with kv.task("t", budget=Budget(retries=2)), pytest.raises(BudgetExceeded, match="retries"):
        graph.compile().invoke({"messages": [HumanMessage("go")]})
    assert (4, 3) == (len(attempts), len(kv.report("t").calls))


@pytest.mark.parametrize("include_raw", [False, True])
def test_a_closing_turn_has_no_structure_and_is_not_asked_for_it_twice(make, include_raw):
    """Whoever wants an object hears that the budget is used up."""
    kv = make(itertools.repeat("ok"))
    shape = {"title": "Answer", "type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    model = ChatAgentKV(kv, max_tokens=5).with_structured_output(shape, include_raw=include_raw)
    before = counters.get("budget_closing_turn", 0)
    with kv.task("t", budget=Budget(model_calls=0, on_exceeded="finish"), final=False):
        if include_raw:
            error = model.invoke("hello")["parsing_error"]
        else:
            with pytest.raises(ValueError, match="no Answer") as raised:
                model.invoke("hello")
            error = raised.value
    assert "used up" in str(error)
    assert before + 1 == counters["budget_closing_turn"]
