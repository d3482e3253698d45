"""Every kind of node that `add_node` accepts, around one body.

A body does what the cell's outcome asks for, and notes whether it ran in a scope of the decorator. It comes in two
colours (`act` and `act_async`); the kinds are made from source text, because a signature cannot be a parameter.
"""

from __future__ import annotations
import __future__

import asyncio
import functools
import operator
import re
import threading
from collections.abc import Callable
from typing import Annotated, Any, Literal

from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, AnyMessage
from langchain_core.runnables import RunnableConfig, RunnableLambda
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.runtime import Runtime
from langgraph.store.base import BaseStore
from langgraph.types import Command, Send, StreamWriter, interrupt
from typing_extensions import TypedDict  # the schemas of pydantic ask for it before Python 3.12

Outcome = Literal[
    "return", "goto", "parent", "send", "interrupt", "raise", "retry", "cancel", "timeout", "cache", "nothing", "model"
]


class State(TypedDict):
    seen: Annotated[list[Any], operator.add]
    messages: Annotated[list[AnyMessage], add_messages]


class Part(TypedDict):
    """What the node asks for; not all of the graph's state."""

    seen: Annotated[list[Any], operator.add]


class Body:
    """What happens inside of the node, and how often it did."""

    def __init__(self, outcome: Outcome, in_scope: Callable[[], bool]) -> None:
        self.outcome = outcome
        self.in_scope = in_scope
        self.scopes: list[bool] = []
        self.started = threading.Event()
        self.released = threading.Event()
        self._lock = threading.Lock()

    def act(self, state: Any, **injected: Any) -> Any:
        run = self._begin()
        if self.outcome == "cancel":
            self.started.set()
            self.released.wait(5)
        if self.outcome == "model":
            return {"messages": [model().invoke("hi")]}
        return self._result(run, state, injected)

    async def act_async(self, state: Any, **injected: Any) -> Any:
        run = self._begin()
        if self.outcome in {"cancel", "timeout"}:
            self.started.set()
            await asyncio.sleep(5)
        await asyncio.sleep(0)
        if self.outcome == "model":
            return {"messages": [await model().ainvoke("hi")]}
        return self._result(run, state, injected)

    def _begin(self) -> int:
        with self._lock:
            self.scopes.append(self.in_scope())
            return len(self.scopes)

    def _result(self, run: int, state: Any, injected: dict[str, Any]) -> Any:
        told = sorted(state) if isinstance(state, dict) else repr(state)
        update = {"seen": [("node", told, *_facts(injected))]}
        match self.outcome:
            case "nothing":
                return None
            case "goto":
                return Command(goto="left", update=update)
            case "parent":
                return Command(graph=Command.PARENT, goto="target", update=update)
            case "send":
                return Command(goto=[Send("worker", {"seen": [n], "messages": []}) for n in range(3)], update=update)
            case "interrupt":
                answers = [interrupt({"ask": n}) for n in range(2)]
                return {"seen": [*update["seen"], *answers]}
            case "raise":
                raise ValueError("the body says no")
            case "retry" if run < 3:
                raise ConnectionError(f"run {run}")
        return update


def _facts(injected: dict[str, Any]) -> list[Any]:
    """What the injected arguments show: the same for the plain and the decorated node."""
    facts: list[Any] = []
    for name, value in injected.items():
        match name:
            case "config":
                facts.append((name, value["metadata"]["langgraph_node"], value["configurable"].get("thread_id")))
            case "runtime":
                value.stream_writer("runtime writes")
                facts.append((name, type(value).__name__, value.context, value.execution_info.node_attempt))
            case "writer":
                value("written")
                facts.append((name,))
            case "store":
                value.put(("cell",), "key", {"n": 1})
                facts.append((name, value.get(("cell",), "key").value))
            case _:
                facts.append((name, value))
    return facts


def model() -> Any:
    return GenericFakeChatModel(messages=iter([AIMessage("one two three", id="answer")]))


SIGNATURES = {
    "state": "state: Part",
    "bare state": "state",
    "config": "state: Part, config: RunnableConfig",
    "optional config": "state: Part, config: RunnableConfig | None = None",
    "runtime": "state: Part, *, runtime: Runtime",
    "positional runtime": "state: Part, runtime: Runtime[Any]",
    "writer": "state: Part, writer: StreamWriter",
    "keyword writer": "state: Part, *, writer: StreamWriter",
    "store": "state: Part, store: BaseStore",
    "keyword store": "state: Part, *, store: BaseStore",
    "previous": "state: Part, previous: Any = None",
    "everything": "state: Part, config: RunnableConfig, writer: StreamWriter, store: BaseStore, *, runtime: Runtime",
}
SIGNATURES["postponed everything"] = SIGNATURES["everything"]  # with annotations that are texts
"""Parameter lists by name; what is behind the state is injected."""

_TEMPLATES = {
    "function": """
def node({params}) -> {returns}:
    return body.act({args})
""",
    "async function": """
async def node({params}) -> {returns}:
    return await body.act_async({args})
""",
    "generator": """
def node({params}):
    yield body.act({args})
""",
    "async generator": """
async def node({params}):
    yield await body.act_async({args})
""",
    "object": """
class Node:
    def __call__(self, {params}) -> {returns}:
        return body.act({args})
node = Node()
""",
    "async object": """
class Node:
    async def __call__(self, {params}) -> {returns}:
        return await body.act_async({args})
node = Node()
""",
    "method": """
class Node:
    def run(self, {params}) -> {returns}:
        return body.act({args})
node = Node().run
""",
    "async method": """
class Node:
    async def run(self, {params}) -> {returns}:
        return await body.act_async({args})
node = Node().run
""",
    "class method": """
class Node:
    @classmethod
    def run(cls, {params}) -> {returns}:
        return body.act({args})
node = Node.run
""",
    "partial": """
def function(first, {params}) -> {returns}:
    return body.act({args})
node = functools.partial(function, "first")
""",
    "async partial": """
async def function(first, {params}) -> {returns}:
    return await body.act_async({args})
node = functools.partial(function, "first")
""",
    "decorated": """
def users_own(fn):
    @functools.wraps(fn)
    def shell(*args, **kwargs):
        return fn(*args, **kwargs)
    return shell
@users_own
def node({params}) -> {returns}:
    return body.act({args})
""",
    "runnable": """
def function({params}) -> {returns}:
    return body.act({args})
node = RunnableLambda(function)
""",
    "async runnable": """
async def function({params}) -> {returns}:
    return await body.act_async({args})
node = RunnableLambda(function)
""",
    "two-colour runnable": """
def function({params}) -> {returns}:
    return body.act({args})
async def afunction({params}) -> {returns}:
    return await body.act_async({args})
node = RunnableLambda(function, afunction)
""",
    "bound runnable": """
def function({params}) -> {returns}:
    return body.act({args})
node = RunnableLambda(function).with_config(tags=["bound"])
""",
    "sequence": """
def function({params}) -> {returns}:
    return body.act({args})
node = RunnableLambda(lambda state: state, name="before") | RunnableLambda(function)
""",
    "own runnable": """
class Node(Runnable):
    def invoke(self, state, config=None, **kwargs):
        return body.act(state)
node = Node()
""",
    "stateful runnable": """
class Node(Runnable):
    count = 0
    def invoke(self, state, config=None, **kwargs):
        self.count += 1
        return body.act(state, count=self.count)
node = Node()
""",
    "stateful sequence": """
class Node(Runnable):
    count = 0
    def invoke(self, state, config=None, **kwargs):
        self.count += 1
        return body.act(state, count=self.count)
node = RunnableLambda(lambda state: state, name="before") | Node()
""",
    "subgraph": """
def function({params}) -> {returns}:
    return body.act({args})
node = subgraph(function)
""",
    "async subgraph": """
async def function({params}) -> {returns}:
    return await body.act_async({args})
node = subgraph(function)
""",
}

KINDS = tuple(_TEMPLATES)
ASYNC_KINDS = tuple(kind for kind in KINDS if kind.startswith("async"))
SYNC_KINDS = tuple(kind for kind in KINDS if kind not in ASYNC_KINDS)
OWN_KINDS = ("own runnable", "stateful runnable", "stateful sequence")
"""Classes of a user's, with the one signature that a Runnable has."""
WITHOUT_INJECTION = ("generator", "async generator", *OWN_KINDS, *(k for k in KINDS if "runnable" in k), "sequence")
"""These run as LangChain's own Runnables, which know nothing but a config."""


def subgraph(function: Callable[..., Any]) -> Any:
    """A compiled graph of one node, and of those that it may go to or send to."""
    targets = [*re.findall("left|right", str(getattr(function, "__annotations__", ""))), "worker"]
    inner = StateGraph(State)
    inner.add_node("inner", function)
    inner.add_edge(START, "inner")
    for name in targets:
        inner.add_node(name, lambda state: {"seen": [("inner", len(state["seen"]))]})
    return inner.compile(name="node")


def make_node(kind: str, body: Body, signature: str = "state") -> Any:
    """An undecorated node of this kind."""
    params = SIGNATURES[signature]
    if kind in OWN_KINDS:
        params = SIGNATURES["state"]
    names = [part.split(":")[0].split("=")[0].strip() for part in params.replace("*, ", "").split(", ")]
    args = ", ".join(["state", *(f"{name}={name}" for name in names[1:])])
    returns = 'Command[Literal["left", "right"]]' if body.outcome == "goto" else "Any"
    from langchain_core.runnables import Runnable

    space: dict[str, Any] = {
        "Any": Any, "BaseStore": BaseStore, "Command": Command, "Literal": Literal, "Part": Part, "Runnable": Runnable,
        "RunnableConfig": RunnableConfig, "RunnableLambda": RunnableLambda, "Runtime": Runtime,
        "StreamWriter": StreamWriter, "body": body, "functools": functools, "subgraph": subgraph, "__name__": "cells",
    }  # fmt: skip
    source = _TEMPLATES[kind].format(params=params, args=args, returns=returns)
    flags = __future__.annotations.compiler_flag if signature.startswith("postponed") else 0
    exec(compile(source, "<cell>", "exec", flags, dont_inherit=True), space)
    return space["node"]
