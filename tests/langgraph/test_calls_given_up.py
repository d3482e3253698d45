"""Model calls of other clients that are cancelled or timed out: LangChain tells no end of them, and yet they have one."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from agentkv_langgraph import AgentKVCallback, ChatAgentKV
from agentkv_langgraph.callback import callback_of
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import tool
from langgraph.errors import NodeTimeoutError
from langgraph.graph import START, MessagesState, StateGraph

from agentkv import Budget, ScriptedEngine
from agentkv.core.hint import HintKind, ToolStatus

USED = {"input_tokens": 5, "output_tokens": 5, "total_tokens": 10}
CONFIG: Any = {"configurable": {"thread_id": "t"}}
GIVEN: Any = {"messages": [HumanMessage("what is the answer?")]}


class Slow(BaseChatModel):
    """Answers when it is let go; `began` is set as soon as a call is on its way."""

    go: Any = None
    began: Any = None
    inner: Any = None
    on_begin: Any = lambda: None

    def model_post_init(self, _context: Any, /) -> None:
        self.go, self.began = asyncio.Event(), asyncio.Event()

    @property
    def _llm_type(self) -> str:
        return "slow"

    def _generate(self, *_: Any, **__: Any) -> ChatResult:
        if self.inner is not None:
            self.inner.invoke("from inside")
        return ChatResult(generations=[ChatGeneration(message=AIMessage("hi", usage_metadata=USED))])

    async def _agenerate(self, *_: Any, **__: Any) -> ChatResult:
        self.began.set()
        self.on_begin()
        await self.go.wait()
        return self._generate()


class Streaming(Slow):
    """Says two words first."""

    async def _astream(self, *_: Any, **__: Any) -> AsyncIterator[ChatGenerationChunk]:
        yield ChatGenerationChunk(message=AIMessageChunk("two words"))
        self.began.set()
        await self.go.wait()
        yield ChatGenerationChunk(message=AIMessageChunk("", usage_metadata=USED))


def graph_of(node: Any, **options: Any) -> Any:
    return StateGraph(MessagesState).add_node("n", node, **options).add_edge(START, "n").compile()


async def timed_out(model: Slow, state: Any, **options: Any) -> None:
    """In the caller's own task, as soon as the call is on its way."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as limit:
            model.on_begin = lambda: limit.reschedule(0.0)
            await model.ainvoke(state["messages"], **options)


async def timed_out_node(kv: Any) -> None:
    async def node(state: MessagesState) -> Any:
        return {"messages": [await Slow().ainvoke(state["messages"], max_tokens=20)]}

    with pytest.raises(NodeTimeoutError):
        await kv.attach(graph_of(node, timeout=1.0)).ainvoke(GIVEN, CONFIG)


async def cancelled_graph(kv: Any) -> None:
    model = Slow()

    async def node(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"], max_tokens=20)]}

    run = asyncio.create_task(kv.attach(graph_of(node)).ainvoke(GIVEN, CONFIG))
    await asyncio.wait_for(model.began.wait(), 60)
    run.cancel()
    await asyncio.wait([run])


async def waited_for_in_the_node(kv: Any) -> None:
    """As `asyncio.wait_for` does it before Python 3.12: in a task of its own."""
    model = Slow()

    async def node(state: MessagesState) -> Any:
        call = asyncio.create_task(model.ainvoke(state["messages"], max_tokens=20))
        await asyncio.wait_for(model.began.wait(), 60)
        call.cancel()
        await asyncio.wait([call])
        return {}

    await kv.attach(graph_of(node)).ainvoke(GIVEN, CONFIG)


async def timed_out_in_the_node(kv: Any) -> None:
    async def node(state: MessagesState) -> Any:
        await timed_out(Slow(), state, max_tokens=20)
        return {}

    await kv.attach(graph_of(node)).ainvoke(GIVEN, CONFIG)


async def model_alone(kv: Any) -> None:
    model = Slow(callbacks=[AgentKVCallback(kv)])
    call = asyncio.create_task(model.ainvoke(GIVEN["messages"], max_tokens=20))
    await asyncio.wait_for(model.began.wait(), 60)
    call.cancel()
    await asyncio.wait([call])


async def one_of_two_at_once(kv: Any) -> None:
    """The other one answers."""
    model, quick = Slow(callbacks=[AgentKVCallback(kv)]), Slow()
    quick.go.set()
    calls = [asyncio.create_task(one.ainvoke(GIVEN["messages"], max_tokens=20)) for one in (model, quick)]
    await calls[1]
    await asyncio.wait_for(model.began.wait(), 60)
    calls[0].cancel()
    await asyncio.wait(calls)


WAYS = (
    timed_out_node, cancelled_graph, waited_for_in_the_node, timed_out_in_the_node, model_alone, one_of_two_at_once,
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
async def test_a_call_that_is_given_up_ends_once_holds_nothing_and_is_billed(kv, hints, way) -> None:
    """One start, one end, one line with the prompt that the server read, and no more room taken than that."""
    with kv.task("t", budget=Budget(tokens=90), final=False):
        for _ in range(4):
            await way(kv)
            await asyncio.sleep(0)
    turns = [hint.kind for hint in hints if hint.kind in (HintKind.TURN_START, HintKind.TURN_END)]
    assert [HintKind.TURN_START, HintKind.TURN_END] * 4 == turns
    bill = kv.report("t")
    assert [("aborted", "CancelledError", True)] * 4 == [(one.status, one.error, one.estimated) for one in bill.calls]
    assert [(1, 0)] * 4 == [(one.usage.calls, one.usage.output_tokens) for one in bill.calls]
    assert all(1 < one.usage.input_tokens < 30 for one in bill.calls)
    account = kv._books.account("t")
    account.check()
    assert (bill.usage.total_tokens, 0, 0) == (
        account.used.tokens,
        account.reserved.tokens,
        account.reserved.model_calls,
    )
    assert {} == callback_of(kv)._models


async def test_time_outs_in_one_node_give_back_what_they_held_before_the_next_call(kv) -> None:
    """The node is its own retry loop, without an end of anything in between."""

    async def node(state: MessagesState) -> Any:
        for _ in range(4):
            await timed_out(Slow(), state, max_tokens=30)
        return {}

    with kv.task("t", budget=Budget(tokens=110), final=False):
        await kv.attach(graph_of(node)).ainvoke(GIVEN, CONFIG)
    assert ["aborted"] * 4 == [one.status for one in kv.report("t").calls]


@pytest.mark.parametrize("leave", ["break", "cancel"])
async def test_a_stream_of_messages_that_is_left_counts_what_was_said(kv, leave) -> None:
    """The node only waits for its answer; LangGraph streams it to a reader who goes."""
    model = Streaming()

    async def node(state: MessagesState) -> Any:
        return {"messages": [await model.ainvoke(state["messages"])]}

    async def read() -> None:
        stream = kv.attach(graph_of(node)).astream(GIVEN, CONFIG, stream_mode="messages")
        async for _ in stream:
            await asyncio.wait_for(model.began.wait(), 60)
            if leave == "break":
                break
        await stream.aclose()

    reader = asyncio.create_task(read())
    await asyncio.wait_for(model.began.wait(), 60)
    if leave == "cancel":
        reader.cancel()
    await asyncio.wait([reader])
    await asyncio.sleep(0.01)
    (call,) = kv.report("t").calls
    assert ("aborted", True, 2) == (call.status, call.estimated, call.usage.output_tokens)
    assert call.usage.input_tokens > 1
    assert {} == callback_of(kv)._models


async def test_several_prompts_of_one_call_that_is_given_up_end_one_by_one(kv) -> None:
    """LangChain starts a run for each."""
    model = Slow(callbacks=[AgentKVCallback(kv)])
    with kv.task("t", final=False):
        call = asyncio.create_task(model.agenerate([[HumanMessage("one")], [HumanMessage("two")]]))
        await asyncio.wait_for(model.began.wait(), 60)
        call.cancel()
        await asyncio.wait([call])
        await asyncio.sleep(0)
    assert ["aborted"] * 2 == [one.status for one in kv.report("t").calls]


async def test_several_prompts_of_one_call_do_not_end_each_other(kv) -> None:
    """Both are on their way though the second began on the same line."""
    model = Slow(callbacks=[AgentKVCallback(kv)])
    model.go.set()
    with kv.task("t", final=False):
        await model.agenerate([[HumanMessage("one")], [HumanMessage("two")]])
    assert ["ok"] * 2 == [one.status for one in kv.report("t").calls]


async def test_calls_of_our_own_model_that_are_given_up_are_not_kept(make_kv) -> None:
    """Their bill is the engine's; the callback holds no prompt of theirs."""
    kv = make_kv(engine=ScriptedEngine(itertools.repeat("ok"), latency_s=30))
    callback, began, loop = AgentKVCallback(kv), asyncio.Event(), asyncio.get_running_loop()
    kv.subscribe(lambda _: loop.call_soon_threadsafe(began.set))
    call = asyncio.create_task(ChatAgentKV(kv, callbacks=[callback]).ainvoke("x"))
    await began.wait()
    assert 1 == len(callback._models)
    call.cancel()
    await asyncio.wait([call])
    await asyncio.sleep(0)
    assert {} == callback._models


async def test_a_call_that_outlives_its_node_is_billed_once_when_it_ends(kv) -> None:
    """The node left it to a task of its own; nobody gave it up."""
    model, calls = Slow(), []

    async def node(state: MessagesState) -> Any:
        calls.append(asyncio.create_task(model.ainvoke(state["messages"])))
        await asyncio.wait_for(model.began.wait(), 60)
        return {}

    await kv.attach(graph_of(node)).ainvoke(GIVEN, CONFIG)
    model.go.set()
    await calls[0]
    assert [("ok", 10)] == [(one.status, one.usage.total_tokens) for one in kv.report("t").calls]


async def test_a_stream_that_is_read_by_a_task_for_each_chunk_is_billed_once_when_it_ends(kv) -> None:
    """As `asyncio.wait_for(anext(stream), 5)` reads it: the task that began it is over long before."""
    model = Streaming(callbacks=[AgentKVCallback(kv)])
    model.go.set()
    with kv.task("t", final=False):
        stream = model.astream("x")
        for _ in range(4):
            await asyncio.create_task(anext(stream, None))
    assert [("ok", 10)] == [(one.status, one.usage.total_tokens) for one in kv.report("t").calls]


async def test_two_streams_side_by_side_in_one_task_do_not_end_each_other(kv) -> None:
    """The second starts while the first one has more to say."""
    models = [Streaming(callbacks=[AgentKVCallback(kv)]) for _ in range(2)]
    with kv.task("t", final=False):
        streams = [model.astream("x") for model in models]
        for stream in streams:
            await anext(stream)
        for model, stream in zip(models, streams, strict=True):
            model.go.set()
            _ = [chunk async for chunk in stream]
    assert [("ok", 10)] * 2 == [(one.status, one.usage.total_tokens) for one in kv.report("t").calls]


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_model_that_asks_another_model_is_not_given_up(kv, is_async) -> None:
    """Its own call is still on the stack when the other one starts, on the same line."""
    callback = AgentKVCallback(kv)
    model = Slow(callbacks=[callback], inner=Slow(callbacks=[callback]))
    model.go.set()
    with kv.task("t", final=False):
        _ = await model.ainvoke("x") if is_async else model.invoke("x")
    assert ["ok", "ok"] == [one.status for one in kv.report("t").calls]


async def test_a_call_in_a_thread_of_ones_own_is_not_ended_by_its_node(kv) -> None:
    """The node goes while the thread waits for its answer."""
    began, go, threads = threading.Event(), threading.Event(), []

    class Blocking(Slow):
        def _generate(self, *_: Any, **__: Any) -> ChatResult:
            began.set()
            go.wait(30)
            return super()._generate()

    def node(state: MessagesState, config: RunnableConfig) -> Any:
        threads.append(threading.Thread(target=lambda: Blocking().invoke("x", config)))
        threads[0].start()
        began.wait(30)
        return {}

    await kv.attach(graph_of(node)).ainvoke(GIVEN, CONFIG)
    go.set()
    await asyncio.to_thread(threads[0].join)
    assert [("ok", 10)] == [(one.status, one.usage.total_tokens) for one in kv.report("t").calls]


class Refuses(BaseCallbackHandler):
    raise_error = True
    run_inline = True

    def on_chat_model_start(self, *_: Any, **__: Any) -> None:
        raise ValueError("not this one")


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_call_that_another_handler_refuses_holds_nothing(kv, is_async) -> None:
    """LangChain tells no end of it either."""
    app = kv.attach(graph_of(lambda state: {"messages": [Slow().invoke("x", {"callbacks": [Refuses()]})]}))
    with kv.task("t", budget=Budget(tokens=500), final=False), pytest.raises(ValueError, match="not this one"):
        _ = await app.ainvoke(GIVEN) if is_async else app.invoke(GIVEN)
    assert 0 == kv._books.account("t").reserved.tokens
    assert {} == callback_of(kv)._models


async def test_one_task_that_makes_many_calls_keeps_one_note_of_them(kv) -> None:
    """And nothing of ours keeps the AgentKV alive in a task that goes on."""
    model = Slow(callbacks=[AgentKVCallback(kv)])
    model.go.set()
    for _ in range(20):
        await model.ainvoke("x")
    task: Any = asyncio.current_task()
    ours = [one for one in getattr(task, "_callbacks", None) or () if "agentkv" in repr(one)]
    assert len(ours) <= 1


async def test_a_cancelled_tool_without_a_graph_is_told_as_cancelled(kv, hints) -> None:
    """Nor does LangChain tell of those."""
    running = asyncio.Event()

    @tool
    async def sleeper() -> str:
        """Sleep."""
        running.set()
        await asyncio.sleep(60)
        return "slept"

    call = asyncio.create_task(sleeper.ainvoke({}, {"callbacks": [AgentKVCallback(kv)]}))
    await running.wait()
    call.cancel()
    await asyncio.wait([call])
    await asyncio.sleep(0)
    assert [ToolStatus.RUNNING, ToolStatus.CANCELLED] == [hint.call.status for hint in hints]
