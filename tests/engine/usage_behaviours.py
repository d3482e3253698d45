"""How servers report usage, and what a bill of each must say: behaviours with their truth, played over real sockets.

The truth is written down beside each script: tokens as the server used them, dollars worked out by hand from `PRICES`.
Covers calls through `AgentKV.remote`, and ChatOpenAI with the callback alone. `play` gives a behaviour's bill and truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from agentkv import AgentKV, Message, Request, ScriptedEngine
from agentkv.budget.prices import Price as Row
from agentkv.budget.prices import PriceTable, Rates, Step, load_prices
from agentkv.core.usage import Usage

sys.path.insert(0, str(Path(__file__).parent))
from usage_server import Reply, Server, chunk, whole

D = Decimal
NOTHING = Usage()
RATES = Rates(
    input=D(2), cached_read=D("0.5"), cache_write=D("2.5"), cache_write_long=D(4), output=D(8)
)  # per million tokens
LONG = Rates(input=D(4), cached_read=D(1), cache_write=D(5), cache_write_long=D(8), output=D(12))
PRIORITY = Rates(input=D("3.5"), cached_read=D("0.875"), output=D(14))
PRICES = PriceTable(
    [
        *load_prices().prices,
        Row(
            model="hosted",
            rates=RATES,
            tiers={"flex": D("0.5"), "batch": D("0.5"), "priority": PRIORITY},
            above=(Step(input_tokens=200_000, rates=LONG),),
        ),
        Row(model="other", rates=Rates(input=D(1), output=D(1))),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One fact of a true bill. `counted`: tokens and dollars are what the server counted for its next such reply."""

    usage: Usage = NOTHING
    usd: str | None = "0"
    status: str = "ok"
    estimated: bool = False
    served: bool = False
    counted: bool = False
    thought: bool = False


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """A server's script, who calls it how, and the bill's lines in order."""

    name: str
    call: Callable[[AgentKV, str], None]
    replies: tuple[Reply, ...]
    truth: tuple[Line, ...]
    more: Callable[[AgentKV, Server], None] | None = None


def used(read: int = 100_000, cached: int = 0, said: int = 10_000, *, thought: int = 0, written: int = 0, long: int = 0, calls: int = 1) -> Usage:  # fmt: skip
    """A usage in few words."""
    return Usage(
        input_tokens=read, cached_tokens=cached, output_tokens=said, calls=calls,
        reasoning_tokens=thought, cache_write_tokens=written, cache_write_long_tokens=long,
    )  # fmt: skip


# -- scripts

TEXT = (chunk("one"), chunk(" two"), chunk(finish="stop"))
PLAIN = {"prompt_tokens": 100_000, "completion_tokens": 10_000, "total_tokens": 110_000}
CACHED = {**PLAIN, "prompt_tokens_details": {"cached_tokens": 60_000}}
THOUGHT = {**CACHED, "completion_tokens_details": {"reasoning_tokens": 4_000}}
ANTHROPIC = {
    "cache_read_input_tokens": 60_000,
    "cache_creation_input_tokens": 30_000,
    "cache_creation": {"ephemeral_5m_input_tokens": 10_000, "ephemeral_1h_input_tokens": 20_000},
}
BESIDE = {"prompt_tokens": 10_000, "completion_tokens": 10_000, "total_tokens": 110_000, **ANTHROPIC}
SEVERAL = {"prompt_tokens": 100_000, "prompt_tokens_details": {"cached_tokens": 60_000}}

_PLAIN = Line(usage=used(), usd="0.28")
_CACHED = Line(usage=used(cached=60_000), usd="0.19")
_BESIDE = Line(usage=used(cached=60_000, written=30_000, long=20_000), usd="0.235")
_REFUSED = Line(status="failed")


def streamed(*reports: dict[str, Any], last: dict[str, Any] | None = None, **more: Any) -> Reply:
    """Text, then chunks without choices that report."""
    ends = (chunk(usage=report, **more) for report in reports)
    return Reply(chunks=(*TEXT, *ends, *(() if last is None else (last,))))


def growing(*counts: int, **more: Any) -> tuple[dict[str, Any], ...]:
    """Chunks of text, each with the usage so far."""
    return tuple(
        chunk(f"part {n} ", usage={**SEVERAL, "completion_tokens": count}, **more) for n, count in enumerate(counts)
    )


# -- calls

PROMPT = (Message(role="system", content="Be brief."), Message(role="user", content="What is the answer, and why?"))


def ask(kv: AgentKV, _url: str) -> None:
    """One call through the remote engine."""
    with kv.task("t", final=False), contextlib.suppress(Exception):
        kv.submit(Request(messages=PROMPT)).result(30)


def ask_twice(kv: AgentKV, url: str) -> None:
    """As an agent that tries again."""
    ask(kv, url)
    ask(kv, url)


def chat(kv: AgentKV, url: str, **options: Any) -> Any:
    """ChatOpenAI with nothing of ours but the callback."""
    from agentkv_langgraph.callback import callback_of
    from langchain_openai import ChatOpenAI

    options = {"model": "hosted", "max_retries": 0, **options}
    return ChatOpenAI(base_url=url, api_key="none", callbacks=[callback_of(kv)], **options)


def invoked(**options: Any) -> Callable[[AgentKV, str], None]:
    """One call in one piece."""

    def call(kv: AgentKV, url: str) -> None:
        with kv.task("t", final=False), contextlib.suppress(Exception):
            chat(kv, url, **options).invoke("What is the answer?")

    return call


def ainvoked(kv: AgentKV, url: str) -> None:
    """The same from a coroutine."""

    async def run() -> None:
        await chat(kv, url).ainvoke("What is the answer?")

    with kv.task("t", final=False):
        asyncio.run(run())


def streaming(**options: Any) -> Callable[[AgentKV, str], None]:
    """One streamed call."""

    def call(kv: AgentKV, url: str) -> None:
        with kv.task("t", final=False), contextlib.suppress(Exception):
            for _ in chat(kv, url, **options).stream("What is the answer?"):
                pass

    return call


def abandoned(kv: AgentKV, url: str) -> None:
    """A consumer that has read enough."""
    with kv.task("t", final=False):
        answer = chat(kv, url, stream_usage=True).stream("What is the answer?")
        next(answer)
        next(answer)
        answer.close()


def unreachable(kv: AgentKV, _url: str) -> None:
    """Nobody listens there."""
    invoked()(kv, "http://127.0.0.1:9/v1")


def cancelled(kv: AgentKV, url: str) -> None:
    """A coroutine that is cancelled while the answer comes."""

    async def read(began: asyncio.Event) -> None:
        async for _ in chat(kv, url).astream("What is the answer?"):
            began.set()

    async def run() -> None:
        began = asyncio.Event()
        reader = asyncio.create_task(read(began))
        await began.wait()
        reader.cancel()
        await asyncio.wait([reader])

    with kv.task("t", final=False):
        asyncio.run(run())


def in_graph(kv: AgentKV, url: str, *, fails: int = 0, mode: str = "values", **options: Any) -> None:
    """A node that calls the model, and may fail after the answer, in a graph with a retry policy."""
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.types import RetryPolicy

    model, left = chat(kv, url, **options), [fails]

    def talk(state: MessagesState) -> dict[str, Any]:
        answer = model.invoke(state["messages"])
        left[0] -= 1
        if left[0] >= 0:
            raise ConnectionError("after the answer")
        return {"messages": [answer]}

    graph = StateGraph(MessagesState)
    graph.add_node(
        talk, retry_policy=RetryPolicy(max_attempts=3, initial_interval=0.001, max_interval=0.001, jitter=False)
    )
    graph.add_edge(START, "talk")
    config = {"configurable": {"thread_id": "t"}}
    for _ in graph.compile().stream({"messages": [("user", "What is the answer?")]}, config, stream_mode=mode):
        pass


def fallen_back(*, stream: bool = False) -> Callable[[AgentKV, str], None]:
    """A primary model that fails, and another one in its place."""

    def call(kv: AgentKV, url: str) -> None:
        model = chat(kv, url).with_fallbacks([chat(kv, url, model="other")])
        with kv.task("t", final=False):
            if stream:
                with contextlib.suppress(Exception):
                    for _ in chat(kv, url).stream("What is the answer?"):
                        pass
                chat(kv, url, model="other").invoke("What is the answer?")
            else:
                model.invoke("What is the answer?")

    return call


def cached_answer(kv: AgentKV, url: str) -> None:
    """Two equal calls behind LangChain's response cache."""
    from langchain_core.caches import InMemoryCache
    from langchain_core.globals import get_llm_cache, set_llm_cache

    before = get_llm_cache()
    set_llm_cache(InMemoryCache())
    try:
        invoked()(kv, url)
        invoked()(kv, url)
    finally:
        set_llm_cache(before)


def retried(kv: AgentKV, url: str) -> None:
    """The SDK's own retries, seen through our HTTP clients."""
    from agentkv_langgraph.attempts import openai_clients

    clients = openai_clients(kv)
    try:
        invoked(max_retries=2, **clients)(kv, url)
    finally:
        clients["http_client"].close()
        asyncio.run(clients["http_async_client"].aclose())


def cut_off_by_length(kv: AgentKV, url: str) -> None:
    """Structured output that ends in the middle: the SDK raises after the answer was paid for."""
    from pydantic import BaseModel

    class Answer(BaseModel):
        text: str

    with kv.task("t", final=False), contextlib.suppress(Exception):
        chat(kv, url).with_structured_output(Answer).invoke("What is the answer?")


# -- the behaviours

ENGINE = [
    ("final chunk without choices", [streamed(CACHED)], [_CACHED]),
    ("null in every chunk but the last", [Reply(chunks=(*(chunk(" x", usage=None) for _ in range(3)), chunk(finish="stop", usage=None), chunk(usage=CACHED)))], [_CACHED]),
    ("growing in every chunk", [Reply(chunks=(*growing(1, 500, 9_000), chunk(finish="stop", usage={**SEVERAL, "completion_tokens": 10_000})))], [_CACHED]),
    ("the last chunk three times", [streamed(CACHED, CACHED, CACHED)], [_CACHED]),
    ("with the finish reason", [Reply(chunks=(chunk("one"), chunk(" two", finish="stop", usage=CACHED)))], [_CACHED]),
    ("input first, output last", [Reply(chunks=(chunk("", usage={**SEVERAL, "completion_tokens": 1}), *TEXT, chunk(usage={"prompt_tokens": 0, "completion_tokens": 10_000})))], [_CACHED]),
    ("input first, nothing later", [Reply(chunks=(chunk("", usage={**PLAIN, "completion_tokens": 0}), *TEXT))], [Line(usage=used(said=2), usd="0.200016", estimated=True)]),
    ("a stale count in the first chunk", [Reply(chunks=(chunk("one", usage={**PLAIN, "completion_tokens": 1}), *TEXT[1:]))], [Line(usage=used(said=2), usd="0.200016", estimated=True)]),
    ("an answer that is reported as nothing", [streamed({**PLAIN, "completion_tokens": 0})], [Line(usage=used(said=2), usd="0.200016", estimated=True)]),
    ("zeros that undo nothing", [streamed(CACHED, {"prompt_tokens": 0, "completion_tokens": 0})], [_CACHED]),
    ("nothing but zeros", [Reply(chunks=(*TEXT, chunk(usage={"prompt_tokens": 0, "completion_tokens": 0})), wrote="one two")], [Line(counted=True, estimated=True)]),
    ("no usage at all", [Reply(chunks=TEXT, wrote="one two")], [Line(counted=True, estimated=True)]),
    ("no usage, and a tool call", [Reply(chunks=(chunk(delta={"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "the sky"}'}}]}), chunk(finish="tool_calls")), wrote='look{"at": "the sky"}')], [Line(counted=True, estimated=True)]),
    ("no usage, and thoughts", [Reply(chunks=(chunk(delta={"reasoning_content": "Let me think."}), chunk(finish="stop")), wrote="Let me think.")], [Line(counted=True, estimated=True, thought=True)]),
    ("a server that rejects the question", [Reply(status=400), Reply(chunks=TEXT, wrote="one two")], [_REFUSED, Line(counted=True, estimated=True)]),
    ("cached beside hits and misses (DeepSeek)", [streamed({**PLAIN, "prompt_cache_hit_tokens": 60_000, "prompt_cache_miss_tokens": 40_000})], [_CACHED]),
    ("usage in the choice (Moonshot)", [Reply(chunks=(chunk("one two"), {**chunk(finish="stop"), "choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "usage": {**PLAIN, "cached_tokens": 60_000}}]}))], [_CACHED]),
    ("usage under x_groq", [Reply(chunks=(chunk("one two"), chunk(finish="stop", x_groq={"id": "r", "usage": CACHED})))], [_CACHED]),
    ("Anthropic beside the input, through a proxy", [streamed(BESIDE)], [_BESIDE]),
    ("Anthropic beside, more than the input", [streamed({**BESIDE, "total_tokens": 20_000})], [_BESIDE]),
    ("Anthropic inside the input, through a proxy", [streamed({**CACHED, **ANTHROPIC})], [_BESIDE]),
    ("Anthropic's own names", [streamed({"input_tokens": 10_000, "output_tokens": 10_000, **ANTHROPIC})], [_BESIDE]),
    ("cache writes inside (OpenAI)", [streamed({**PLAIN, "prompt_tokens_details": {"cached_tokens": 60_000, "cache_write_tokens": 30_000}})], [Line(usage=used(cached=60_000, written=30_000), usd="0.205")]),
    ("vLLM without details", [streamed({**PLAIN, "prompt_tokens_details": None})], [_PLAIN]),
    ("SGLang with its tiers", [Reply(chunks=(*TEXT, chunk(usage=CACHED, sglext={"cached_tokens_details": {"device": 40_000, "host": 15_000, "storage": 5_000}})))], [_CACHED]),
    ("llama.cpp's timings alone", [Reply(chunks=(*TEXT[:2], chunk(finish="stop", timings={"cache_n": 60_000, "prompt_n": 40_000, "predicted_n": 10_000})))], [_CACHED]),
    ("llama.cpp's usage and timings", [Reply(chunks=(*TEXT, chunk(usage=PLAIN, timings={"cache_n": 60_000, "prompt_n": 40_000, "predicted_n": 10_000})))], [_CACHED]),
    ("thoughts inside the output", [streamed(THOUGHT)], [Line(usage=used(cached=60_000, thought=4_000), usd="0.19")]),
    ("thoughts beside the output (xAI)", [streamed({**THOUGHT, "completion_tokens": 6_000})], [Line(usage=used(cached=60_000, thought=4_000), usd="0.19")]),
    ("flex tier", [streamed(CACHED, service_tier="flex")], [Line(usage=used(cached=60_000), usd="0.095")]),
    ("priority tier", [streamed(CACHED, service_tier="priority")], [Line(usage=used(cached=60_000), usd="0.3325")]),
    ("default tier", [streamed(CACHED, service_tier="default")], [_CACHED]),
    ("a tier without a price", [streamed(CACHED, service_tier="scale")], [Line(usage=used(cached=60_000), usd=None)]),
    ("a long context's price", [streamed({"prompt_tokens": 300_000, "completion_tokens": 10_000, "prompt_tokens_details": {"cached_tokens": 100_000}})], [Line(usage=used(300_000, 100_000), usd="1.02")]),
    ("no model name", [Reply(chunks=tuple({k: v for k, v in one.items() if k != "model"} for one in (*TEXT, chunk(usage=CACHED))))], [_CACHED]),
    ("a dated snapshot", [streamed(CACHED, model="gpt-4.1-2025-04-14")], [_CACHED]),
    ("a model without a price", [streamed(CACHED, model="nobody-knows")], [Line(usage=used(cached=60_000), usd=None)]),
    ("more cached than read", [streamed({**PLAIN, "prompt_tokens_details": {"cached_tokens": 900_000}})], [Line(usage=used(cached=100_000), usd="0.13", estimated=True)]),
    ("less than nothing", [streamed({**PLAIN, "prompt_tokens_details": {"cached_tokens": -5}})], [Line(usage=used(), usd="0.28", estimated=True)]),
    ("numbers as texts", [streamed({"prompt_tokens": "100000", "completion_tokens": "10000"})], [Line(usage=used(), usd="0.28", estimated=True)]),
    ("refused for load, then answered", [Reply(status=429), Reply(status=503), streamed(CACHED)], [_REFUSED, _REFUSED, _CACHED]),
    ("lost before the answer, then answered", [Reply(status=0), streamed(CACHED)], [Line(usage=used(said=0), usd="0.2", status="failed", estimated=True), _CACHED]),
    ("refused for good", [Reply(status=401)], [_REFUSED]),
    ("broken off, with usage so far", [Reply(chunks=growing(1, 500, 9_000), cut=3)], [Line(usage=used(cached=60_000, said=9_000), usd="0.182", status="failed")]),
    ("broken off, nothing reported", [Reply(chunks=TEXT, cut=2, wrote="one two")], [Line(counted=True, estimated=True, status="failed")]),
]  # fmt: skip

CHAT = [
    ("one piece", invoked(), [Reply(body=whole(usage=THOUGHT))], [Line(usage=used(cached=60_000, thought=4_000), usd="0.19")]),
    ("one piece, from a coroutine", ainvoked, [Reply(body=whole(usage=CACHED))], [_CACHED]),
    ("one piece without a model name", invoked(), [Reply(body=whole(usage=CACHED, model="absent"))], [_CACHED]),
    ("one piece without usage", invoked(), [Reply(body=whole(), wrote="one two")], [Line(counted=True, estimated=True)]),
    ("one piece, reported as nothing", invoked(), [Reply(body=whole(usage={**PLAIN, "completion_tokens": 0, "total_tokens": 100_000}))], [Line(usage=used(said=2), usd="0.200016", estimated=True)]),
    ("one piece, DeepSeek", invoked(), [Reply(body=whole(usage={**PLAIN, "prompt_cache_hit_tokens": 60_000}))], [_CACHED]),
    ("one piece, Anthropic beside", invoked(), [Reply(body=whole(usage=BESIDE))], [_BESIDE]),
    ("one piece, flex", invoked(), [Reply(body=whole(usage=THOUGHT, service_tier="flex"))], [Line(usage=used(cached=60_000, thought=4_000), usd="0.095")]),
    ("one piece, thoughts beside", invoked(), [Reply(body=whole(usage={**THOUGHT, "completion_tokens": 6_000}))], [Line(usage=used(cached=60_000, thought=4_000), usd="0.19")]),
    ("streamed, asked for", streaming(stream_usage=True), [streamed(CACHED)], [_CACHED]),
    ("streamed, not asked for", streaming(), [Reply(chunks=TEXT, wrote="one two")], [Line(counted=True, estimated=True)]),
    ("streamed, growing", streaming(stream_usage=True), [Reply(chunks=(*growing(1, 500, 9_000), chunk(finish="stop", usage={**SEVERAL, "completion_tokens": 10_000})))], [_CACHED]),
    ("streamed, repeated", streaming(stream_usage=True), [streamed(CACHED, CACHED)], [_CACHED]),
    ("streamed, null between", streaming(stream_usage=True), [Reply(chunks=(chunk("one", usage=None), chunk(" two", usage=None), chunk(finish="stop"), chunk(usage=CACHED)))], [_CACHED]),
    ("streamed, input first", streaming(stream_usage=True), [Reply(chunks=(chunk("", usage={**SEVERAL, "completion_tokens": 1}), *TEXT, chunk(usage={"prompt_tokens": 0, "completion_tokens": 10_000})))], [_CACHED]),
    ("streamed, priority, cached", streaming(stream_usage=True), [streamed(CACHED, service_tier="priority")], [Line(usage=used(cached=60_000), usd="0.3325")]),
    ("streamed, broken off with usage", streaming(stream_usage=True), [Reply(chunks=growing(1, 500, 9_000), cut=3)], [Line(usage=used(cached=60_000, said=9_000), usd="0.182", status="failed")]),
    ("streamed, broken off without", streaming(), [Reply(chunks=TEXT, cut=2, wrote="one two")], [Line(counted=True, estimated=True, status="failed")]),
    ("streamed, given up by the reader", abandoned, [Reply(chunks=TEXT, wrote="one two")], [Line(counted=True, estimated=True, status="aborted")]),
    ("streamed, cancelled", cancelled, [Reply(chunks=(chunk("one two"),), hold=True, wrote="one two")], [Line(counted=True, estimated=True, status="aborted")]),
    ("lost before the answer", invoked(), [Reply(status=0, wrote="")], [Line(counted=True, estimated=True, status="failed")]),
    ("refused", invoked(), [Reply(status=401)], [_REFUSED]),
    ("never reached", unreachable, [], [_REFUSED]),
    ("stream_mode=messages in a graph", lambda kv, url: in_graph(kv, url, mode="messages"), [Reply(chunks=TEXT, wrote="one two")], [Line(counted=True, estimated=True)]),
    ("a node that fails twice after the answer", lambda kv, url: in_graph(kv, url, fails=2), [Reply(body=whole(usage=CACHED))] * 3, [_CACHED] * 3),
    ("a fallback after a refusal", fallen_back(), [Reply(status=500), Reply(body=whole(usage=PLAIN, model="other"))], [_REFUSED, Line(usage=used(), usd="0.11")]),
    ("a fallback after half an answer", fallen_back(stream=True), [Reply(chunks=growing(1, 500, 9_000), cut=3), Reply(body=whole(usage=PLAIN, model="other"))], [Line(usage=used(cached=60_000, said=9_000), usd="0.182", status="failed"), Line(usage=used(), usd="0.11")]),
    ("an answer from the response cache", cached_answer, [Reply(body=whole(usage=CACHED))], [_CACHED, Line(served=True)]),
    ("retries of the SDK, refused", retried, [Reply(status=429), Reply(status=500), Reply(body=whole(usage=CACHED))], [_REFUSED, _REFUSED, _CACHED]),
    ("retries of the SDK, after the answer began", retried, [Reply(body=whole(usage=PLAIN), cut=0, wrote=""), Reply(body=whole(usage=CACHED))], [Line(counted=True, estimated=True, status="failed"), _CACHED]),
    ("retries of the SDK, in vain", retried, [Reply(status=500)] * 3, [_REFUSED] * 3),
    ("an answer cut off by its length", cut_off_by_length, [Reply(body=whole('{"te', finish="length", usage=CACHED))], [Line(usage=used(cached=60_000), usd="0.19", status="failed")]),
]  # fmt: skip

BEHAVIOURS = (
    *(Behaviour(name=f"engine: {n}", call=ask, replies=tuple(r), truth=tuple(t)) for n, r, t in ENGINE),
    Behaviour(
        name="engine: tried again after half an answer",
        call=ask_twice,
        replies=(Reply(chunks=growing(1, 500, 9_000), cut=3), streamed(CACHED)),
        truth=(Line(usage=used(cached=60_000, said=9_000), usd="0.182", status="failed"), _CACHED),
    ),
    *(Behaviour(name=f"chat: {n}", call=c, replies=tuple(r), truth=tuple(t)) for n, c, r, t in CHAT),
)


# -- playing


@contextlib.contextmanager
def kv_for(behaviour: Behaviour, url: str) -> Iterator[AgentKV]:
    """An AgentKV whose calls go to the server, or one that only listens to LangChain."""
    if behaviour.name.startswith("engine"):
        kv = AgentKV.remote(base_url=url, model="hosted", ledger="memory", context=None, prices=PRICES)
    else:
        from agentkv_langgraph import LangGraphHost

        kv = AgentKV.with_engine(ScriptedEngine(["x"]), host=LangGraphHost(), context=None, prices=PRICES)
    with kv:
        yield kv


Billed = tuple[Usage, "Decimal | None", str, bool, bool]


def play(behaviour: Behaviour) -> tuple[list[Billed], list[Billed]]:
    """The bill of the behaviour, and the truth: per fact its usage, dollars, status, and whether it is estimated or
    was served locally.
    """
    with Server(replies=list(behaviour.replies)) as server, kv_for(behaviour, server.url) as kv:
        behaviour.call(kv, server.url)
        calls = kv.report("t").calls
        assert not server.replies, "not all of the script was played"
        bill = [(call.usage, call.cost_usd, call.status, call.estimated, call.served_locally) for call in calls]
        counted = iter(server.counted)
        return bill, [_true(line, counted) for line in behaviour.truth]


def _true(line: Line, counted: Iterator[tuple[int, int]]) -> Billed:
    usage, usd = line.usage, None if line.usd is None else Decimal(line.usd)
    if line.counted:
        read, wrote = next(counted)
        usage = used(read, said=wrote, thought=wrote if line.thought else 0)
        usd = (RATES.input * read + RATES.output * wrote) / 1_000_000
    return usage, usd, line.status, line.estimated, line.served
