"""LangChain's own model over `kv.openai()`, with the callback attached: each call is booked by the engine, once."""

import asyncio

import pytest
from agentkv_langgraph.callback import callback_of

from agentkv import AgentKV, Budget, ScriptedEngine

ChatOpenAI = pytest.importorskip("langchain_openai").ChatOpenAI

WORDS = "one two three four five six seven eight"


@pytest.fixture
def kv():
    with AgentKV.with_engine(ScriptedEngine([WORDS] * 9, latency_s=0.05)) as made:
        yield made


def model(kv):
    client, aclient = kv.openai(), kv.async_openai()
    return ChatOpenAI(
        model="scripted", api_key="x", callbacks=[callback_of(kv)], client=client.chat.completions, root_client=client,
        async_client=aclient.chat.completions, root_async_client=aclient, max_tokens=16,
    )  # fmt: skip


def stopped(kv):
    answer = model(kv).stream("count to eight")
    next(answer)
    next(answer)
    answer.close()


def whole(kv):
    model(kv).invoke("count to eight")


def streamed(kv):
    list(model(kv).stream("count to eight"))


def asynchronous(kv):
    asyncio.run(model(kv).ainvoke("count to eight"))


@pytest.mark.parametrize("way", [whole, streamed, asynchronous, stopped])
def test_a_call_through_our_own_door_is_on_the_bill_once(kv, way):
    """However it ends, also where its reader stops; and its budget sets aside one call, not two."""
    with kv.task("t", budget=Budget(model_calls=1), final=False):
        way(kv)
    for _ in range(100):
        if kv.report("t").calls:
            break
        asyncio.run(asyncio.sleep(0.01))
    asyncio.run(asyncio.sleep(0.1))
    assert 1 == len(kv.report("t").calls)
