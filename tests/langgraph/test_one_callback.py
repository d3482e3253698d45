"""However often and wherever AgentKVCallback is put: each call is told, held and billed once."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
from agentkv_langgraph import AgentKVCallback, AgentKVMiddleware, LangGraphHost
from agentkv_langgraph.callback import callback_of
from langchain.agents import create_agent
from langchain_core.callbacks import CallbackManager
from langchain_core.language_models import FakeListLLM, GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.tools import tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode

from agentkv import AgentKV, Budget, ScriptedEngine
from agentkv.core.hint import HintKind

USED = {"input_tokens": 5, "output_tokens": 5, "total_tokens": 10}
CONFIG: Any = {"configurable": {"thread_id": "t"}}
TURN = [HintKind.TURN_START, HintKind.TURN_END]


class Mine(AgentKVCallback):
    """A user's own."""


@tool
def shell(cmd: str) -> str:
    """Run a command."""
    return cmd


class Chat(GenericFakeChatModel):
    def bind_tools(self, *_: Any, **__: Any) -> Any:
        return self


def chat(*, usage: Any = USED, **options: Any) -> Chat:
    call = {"name": "shell", "args": {"cmd": "ls"}, "id": "c"}
    answers = [
        AIMessage("one two three", tool_calls=[call], usage_metadata=usage),
        AIMessage("x", usage_metadata=usage),
    ]
    return Chat(messages=iter(answers), **options)


def graph_of(model: Any, config: Any = None) -> Any:
    """A model call and its tool."""
    graph = StateGraph(MessagesState)
    graph.add_node("talk", lambda state: {"messages": [model.invoke(state["messages"], config)]})
    graph.add_node("tools", ToolNode([shell]))
    graph.add_edge(START, "talk")
    graph.add_edge("talk", "tools")
    return graph.compile()


def attached_and_in_the_config(kv: Any) -> Any:
    return kv.attach(graph_of(chat())), {**CONFIG, "callbacks": [AgentKVCallback(kv)]}


def two_in_the_config(kv: Any) -> Any:
    return graph_of(chat()), {**CONFIG, "callbacks": [AgentKVCallback(kv), AgentKVCallback(kv)]}


def bound_twice(kv: Any) -> Any:
    app = graph_of(chat()).with_config(callbacks=[AgentKVCallback(kv)]).with_config(callbacks=[AgentKVCallback(kv)])
    return app, CONFIG


def attached_and_the_models_own(kv: Any) -> Any:
    return kv.attach(graph_of(chat(callbacks=[AgentKVCallback(kv)]))), CONFIG


def attached_and_in_the_call(kv: Any) -> Any:
    return kv.attach(graph_of(chat(), {"callbacks": [AgentKVCallback(kv)]})), CONFIG


def in_managers(kv: Any) -> Any:
    twice, once = [AgentKVCallback(kv), AgentKVCallback(kv)], [callback_of(kv)]
    manager = CallbackManager(twice, twice).merge(CallbackManager(once, once))  # for runs inside of the run too
    return kv.attach(graph_of(chat())), {**CONFIG, "callbacks": manager}


def copied(kv: Any) -> Any:
    callback = AgentKVCallback(kv)
    return kv.attach(graph_of(chat())), {**CONFIG, "callbacks": [copy.copy(callback), copy.deepcopy(callback)]}


def ones_own_and_attached(kv: Any) -> Any:
    app, config = graph_of(chat()), {**CONFIG, "callbacks": [Mine(kv)]}
    return kv.attach(app), config


WAYS = (
    attached_and_in_the_config, two_in_the_config, bound_twice, attached_and_the_models_own, attached_and_in_the_call,
    in_managers, copied, ones_own_and_attached,
)  # fmt: skip


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
def test_a_call_is_told_held_and_billed_once(kv, hints, way, streamed) -> None:
    """A budget of one model call and one tool call is enough. The model streams no usage (it is counted) and no calls."""
    app, config = way(kv)
    if way is attached_and_in_the_call:  # it says who is to hear of it, and so LangGraph does not stream it
        streamed = False
    with kv.task("t", budget=Budget(model_calls=1, tool_calls=1), final=False):
        list(app.stream({"messages": ["x"]}, config, stream_mode="messages" if streamed else "values"))
    bill = kv.report("t")
    expected = (1, 9, 3) if streamed else (1, 5, 5)
    assert expected == (bill.usage.calls, bill.usage.input_tokens, bill.usage.output_tokens)
    assert [("shell", "succeeded")] * (not streamed) == [(one.tool, one.status) for one in bill.tools]
    assert TURN == [hint.kind for hint in hints if hint.kind in TURN]
    assert 2 * (not streamed) == sum(hint.call is not None for hint in hints)
    callback = callback_of(kv)
    assert ({}, {}) == (callback._models, callback._tools)
    kv._books.account("t").check()


@pytest.mark.parametrize("is_async", [False, True])
async def test_what_a_stream_says_is_counted_once(kv, is_async) -> None:
    """Two handlers hear each word; nothing is told, so it is counted here."""
    model = chat(usage=None) if is_async else FakeListLLM(responses=["one two three"])
    config: Any = {"callbacks": [AgentKVCallback(kv), Mine(kv), AgentKVCallback(kv)]}
    with kv.task("t", final=False):
        _ = [chunk async for chunk in model.astream("x", config)] if is_async else list(model.stream("x", config))
    (call,) = kv.report("t").calls
    assert (True, 3) == (call.estimated, call.usage.output_tokens)


def test_an_agent_with_the_middleware_and_the_callback_is_billed_once(kv) -> None:
    """Two turns, one tool."""
    agent = create_agent(chat(), [shell], middleware=[AgentKVMiddleware(kv), AgentKVMiddleware(kv)])
    kv.attach(agent).invoke({"messages": [("user", "x")]}, {**CONFIG, "callbacks": [AgentKVCallback(kv)]})
    assert (2, 20, 1) == (kv.report("t").usage.calls, kv.report("t").usage.total_tokens, len(kv.report("t").tools))


def test_a_call_may_have_a_run_id_that_another_one_had(kv) -> None:
    """The user's own, given again: two calls."""
    from uuid import uuid4

    config: Any = {"callbacks": [AgentKVCallback(kv)] * 2, "run_id": uuid4()}
    model = chat()
    with kv.task("t", final=False):
        for _ in range(2):
            model.invoke("x", config)
    assert 2 == kv.report("t").usage.calls


def test_there_is_one_callback_of_an_agentkv_and_another_one_of_another(make_kv) -> None:
    """And a class of one's own has one of its own, which shares the books."""
    one, other = make_kv(), make_kv()
    assert AgentKVCallback(one) is AgentKVCallback(one) is callback_of(one)
    assert AgentKVCallback(one) is not AgentKVCallback(other)
    assert type(Mine(one)) is Mine
    assert Mine(one) is not AgentKVCallback(one)


def test_a_call_with_the_callbacks_of_two_agentkvs_is_on_the_bill_of_each(make_kv) -> None:
    """They are two, and each has one."""
    one, other = make_kv(), make_kv()
    chat().invoke("x", {"callbacks": [AgentKVCallback(one), AgentKVCallback(other), AgentKVCallback(one)]})
    assert [1, 1] == [kv.report("unattributed").usage.calls for kv in (one, other)]


def test_a_callback_keeps_no_agentkv_alive_and_gives_none_to_the_next() -> None:
    """A new AgentKV may get the address of one that is gone."""
    for _ in range(50):
        kv = AgentKV.with_engine(ScriptedEngine([]), host=LangGraphHost())
        gone = weakref.ref(kv)
        assert AgentKVCallback(kv)._kv is kv
        assert Mine(kv)._kv is kv
        kv.close()
        del kv
        gc.collect()
        assert gone() is None
