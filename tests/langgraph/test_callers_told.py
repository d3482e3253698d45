"""A config that is handed over: it names the run's own task, in every way to call a model and from any thread."""

from __future__ import annotations

import asyncio
import itertools
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from agentkv_langgraph import AgentKVCallback, ChatAgentKV
from langchain_core.callbacks import BaseCallbackHandler, CallbackManager
from langchain_core.language_models import FakeListLLM, GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableConfig
from langgraph.graph import START, MessagesState, StateGraph

USED = {"input_tokens": 5, "output_tokens": 5, "total_tokens": 10}
CONFIGS: list[dict[str, Any]] = [{"thread_id": "t"}, {"thread_id": "other", "agentkv_task_id": "t"}]


async def _taken(stream: Any) -> None:
    async for _ in stream:
        pass


def v3(model: Any, config: Any) -> None:
    if not hasattr(model, "_chat_model_stream_v3"):
        pytest.skip("this LangChain has no such streams")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _ = model.stream_events("x", config, version="v3").output


async def _av3(model: Any, config: Any) -> None:
    await (await model.astream_events("x", config, version="v3"))


def av3(model: Any, config: Any) -> None:
    if not hasattr(model, "_achat_model_stream_v3"):
        pytest.skip("this LangChain has no such streams")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        asyncio.run(_av3(model, config))


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "invoke": lambda model, config: model.invoke("x", config),
    "ainvoke": lambda model, config: asyncio.run(model.ainvoke("x", config)),
    "stream": lambda model, config: list(model.stream("x", config)),
    "astream": lambda model, config: asyncio.run(_taken(model.astream("x", config))),
    "batch": lambda model, config: model.batch(["x"], config),
    "abatch": lambda model, config: asyncio.run(model.abatch(["x"], config)),
    "transform": lambda model, config: list(model.transform(iter(["x"]), config)),
    "astream_events": lambda model, config: asyncio.run(_taken(model.astream_events("x", config, version="v2"))),
    "stream_events": v3,
    "astream_events v3": av3,
}


@pytest.mark.parametrize("configurable", CONFIGS, ids=["thread", "task"])
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_config_names_the_task_of_a_call_in_every_way_to_make_it(kv, way, bound, configurable) -> None:
    """Without a graph around it; streams too."""
    model: Any = ChatAgentKV(kv)
    config = {"configurable": configurable}
    if bound:
        WAYS[way](model.with_config(config), None) if "event" not in way else WAYS[way](model, config)
    else:
        WAYS[way](model, config)
    assert (1, 0) == (kv.report("t").usage.calls, kv.report("unattributed").usage.calls)


def test_a_stream_that_is_left_or_read_elsewhere_names_nobody_elses_calls(kv) -> None:
    """Between two chunks the caller is the reader."""
    model = ChatAgentKV(kv)
    stream = model.stream("x", {"configurable": {"thread_id": "t"}})
    next(stream)
    model.invoke("beside it")
    with ThreadPoolExecutor(1) as pool:
        pool.submit(list, stream).result()
    assert (1, 1) == (kv.report("t").usage.calls, kv.report("unattributed").usage.calls)


async def test_a_stream_with_a_config_that_is_left_ends_its_call(make_kv) -> None:
    """As one without: the engine stops."""
    from agentkv import ScriptedEngine

    engine = ScriptedEngine(["one two three four"] * 2, latency_s=0.01)
    kv = make_kv(engine=engine)
    stream = ChatAgentKV(kv).astream("x", {"configurable": {"thread_id": "t"}})
    await anext(stream)
    await stream.aclose()
    sync = ChatAgentKV(kv).stream("x", {"configurable": {"thread_id": "t"}})
    next(sync)
    sync.close()
    assert ["aborted"] * 2 == [call.status for call in kv.report("t").calls]


def own(kv: Any) -> Any:
    return ChatAgentKV(kv)


def foreign(_kv: Any) -> Any:
    return GenericFakeChatModel(messages=itertools.repeat(AIMessage("hi", usage_metadata=USED)))


def in_thread(call: Callable[..., Any], *args: Any) -> None:
    thread = threading.Thread(target=call, args=args)
    thread.start()
    thread.join()


@pytest.mark.parametrize("first", ["node", "thread"])
@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("named", ["thread", "task id", "kv.task"])
@pytest.mark.parametrize("run", [(own, False), (own, True), (foreign, True)], ids=["own", "own attached", "foreign"])
def test_a_thread_with_the_nodes_config_calls_for_the_runs_own_task(kv, run, named, streams, first) -> None:
    """Whatever named it: the thread, its own key, or a scope around the run."""
    make, attached = run
    if first == "thread" and (make, named) == (foreign, "task id"):
        pytest.skip("LangGraph shows the key to nobody outside of the node's own context: docs/langgraph.md, Limits")
    if first == "thread" and named == "kv.task" and not attached:
        pytest.skip("nothing of the run was seen: docs/langgraph.md, Limits")
    model = make(kv)

    def call(text: str, config: Any = None) -> None:
        _ = list(model.stream(text, config)) if streams else model.invoke(text, config)

    def node(_state: MessagesState, config: RunnableConfig) -> Any:
        if first == "node":
            call("in the node")
        in_thread(call, "in my thread", config)
        return {}

    def later(_state: MessagesState, config: RunnableConfig) -> Any:
        if first == "node":  # nothing was called in this node's own context
            in_thread(call, "in a later node's thread", config)
        return {}

    graph = StateGraph(MessagesState).add_node("n", node).add_node("later", later)
    app = graph.add_edge(START, "n").add_edge("n", "later").compile()
    app = kv.attach(app) if attached else app
    configurable = {"thread_id": "t"} if named == "thread" else {"thread_id": "another"}
    if named == "task id":
        configurable["agentkv_task_id"] = "t"
    if named == "kv.task":
        with kv.task("t", final=False):
            app.invoke({"messages": []}, {"configurable": configurable})
    else:
        app.invoke({"messages": []}, {"configurable": configurable})
    calls = 3 if first == "node" else 1
    assert (calls, 0) == (kv.report("t").usage.calls, kv.report("another").usage.calls)


def test_a_scope_inside_of_a_node_names_only_what_runs_in_it(kv) -> None:
    """Threads of the run that know only its config belong to the run."""
    models = [own(kv), foreign(kv)]

    def node(_state: MessagesState, config: RunnableConfig) -> Any:
        with kv.task("inner", final=False):
            for model in models:
                model.invoke("x")
        for model in models:
            in_thread(model.invoke, "x", config)
        return {}

    app = StateGraph(MessagesState).add_node("n", node).add_edge(START, "n").compile()
    kv.attach(app).invoke({"messages": []}, {"configurable": {"thread_id": "t"}})
    assert (2, 2) == (kv.report("t").usage.calls, kv.report("inner").usage.calls)


def test_a_graph_inside_of_a_run_that_has_a_key_of_its_own_keeps_to_it(kv) -> None:
    """What was called in there says nothing of the run around it."""
    model = foreign(kv)

    def inner_node(_state: MessagesState, config: RunnableConfig) -> Any:
        model.invoke("x")
        in_thread(model.invoke, "x", config)
        return {}

    inner = StateGraph(MessagesState).add_node("i", inner_node).add_edge(START, "i").compile()

    def outer_node(state: MessagesState, config: RunnableConfig) -> Any:
        inner.invoke(state, {"configurable": {"agentkv_task_id": "inner"}})
        in_thread(model.invoke, "x", config)
        return {}

    app = StateGraph(MessagesState).add_node("o", outer_node).add_edge(START, "o").compile()
    kv.attach(app).invoke({"messages": []}, {"configurable": {"thread_id": "outer"}})
    assert (2, 1) == (kv.report("inner").usage.calls, kv.report("outer").usage.calls)


def test_a_run_under_the_scope_of_one_agentkv_is_not_anothers(make_kv) -> None:
    """Scopes speak for their own AgentKV only."""
    one, other = make_kv(), make_kv()

    def node(_state: MessagesState, config: RunnableConfig) -> Any:
        for kv in (one, other):
            own(kv).invoke("x")
            in_thread(own(kv).invoke, "x", config)
        return {}

    app = StateGraph(MessagesState).add_node("n", node).add_edge(START, "n").compile()
    with one.task("t", final=False):
        app.invoke({"messages": []}, {"configurable": {"thread_id": "thread"}})
    assert (2, 0, 2) == (
        one.report("t").usage.calls, one.report("thread").usage.calls, other.report("thread").usage.calls,
    )  # fmt: skip


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "astream", "batch"])
@pytest.mark.parametrize("what", ["model", "bound", "text model", "chain"])
@pytest.mark.parametrize("configurable", CONFIGS, ids=["thread", "task"])
def test_an_attached_runnable_that_is_no_graph_is_billed_to_the_configs_task(kv, what, way, configurable) -> None:
    """A bare model, one with options bound, one that writes text, a chain; each twice attached."""
    model = foreign(kv)
    made: Any = {
        "model": model,
        "bound": model.bind(stop=["x"]),
        "text model": FakeListLLM(responses=["hi"]),
        "chain": ChatPromptTemplate.from_template("{q}") | model,
    }[what]
    ours = kv.attach(kv.attach(made))
    given: Any = {"q": "x"} if what == "chain" else "x"
    config: Any = {"configurable": configurable}
    {
        "invoke": lambda: ours.invoke(given, config),
        "ainvoke": lambda: asyncio.run(ours.ainvoke(given, config)),
        "stream": lambda: list(ours.stream(given, config)),
        "astream": lambda: asyncio.run(_taken(ours.astream(given, config))),
        "batch": lambda: ours.batch([given], config),
    }[way]()
    assert (1, 0) == (kv.report("t").usage.calls, kv.report("unattributed").usage.calls)
    with kv.task("explicit", final=False):
        ours.invoke(given, config)
    assert (1, 1) == (kv.report("t").usage.calls, kv.report("explicit").usage.calls)


def test_what_else_hears_of_an_attached_runnable_hears_it_once(kv) -> None:
    """Handlers and tags of the user's are as they were."""
    started = []

    class Other(BaseCallbackHandler):
        def on_chat_model_start(self, *_: Any, tags: Any = None, **__: Any) -> None:
            started.append(tags)

    ours = kv.attach(foreign(kv))
    ours.invoke("x", {"callbacks": [Other()], "tags": ["mine"], "configurable": {"thread_id": "t"}})
    ours.invoke("x", {"callbacks": CallbackManager([Other()]), "tags": ["mine"], "configurable": {"thread_id": "t"}})
    assert [["mine"]] * 2 == started


def test_what_is_remembered_of_runs_goes_with_them(kv) -> None:
    """A thousand runs leave the callback as empty as it was, and no more than so many of the rest."""
    from agentkv_langgraph.caller import run_tasks

    model = own(kv)
    app = StateGraph(MessagesState).add_node("n", lambda _: {"messages": [model.invoke("x")]}).add_edge(START, "n")
    attached = kv.attach(app.compile())
    for number in range(50):
        with kv.task(f"t-{number}"):
            attached.invoke({"messages": []}, {"configurable": {"thread_id": "x"}})
    assert 0 == len(AgentKVCallback(kv)._runs)
    assert len(run_tasks._tasks) <= run_tasks._keep
