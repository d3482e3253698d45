"""A decorated Runnable is the object that it was: what it keeps from run to run, whoever looks at it, and its copies.

Stateful Runnables in every way to run a graph are cells of the matrix (`tests/integrations/langgraph`).
"""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
from langchain_core.language_models import FakeListChatModel, GenericFakeChatModel
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableSerializable
from langchain_core.tools import BaseTool
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import ConfigDict, PrivateAttr


class Counter(Runnable):
    """Counts in its `__dict__`."""

    n = 0

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> int:  # noqa: A002
        self.n += 1
        return self.n


class AsyncCounter(Counter):
    """Counts in a coroutine and in a stream of its own too."""

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> int:  # noqa: A002
        await asyncio.sleep(0)
        self.n += 1
        return self.n

    def stream(self, input: Any, config: Any = None, **kwargs: Any) -> Any:  # noqa: A002
        for _ in range(2):
            self.n += 1
            yield self.n


class SlotCounter(Runnable):
    """Counts in a slot."""

    __slots__ = ("__hidden", "n")

    def __init__(self) -> None:
        self.n = self.__hidden = 0

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> int:  # noqa: A002
        self.__hidden += 1
        self.n = self.__hidden
        return self.n


class ModelCounter(RunnableSerializable):
    """Counts in a field of pydantic's."""

    n: int = 0

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> int:  # noqa: A002
        self.n += 1
        return self.n


class CheckedCounter(ModelCounter):
    """With a pydantic that builds the fields anew at each assignment."""

    model_config = ConfigDict(validate_assignment=True)


class PrivateCounter(RunnableSerializable):
    """Counts in a private attribute of pydantic's."""

    _n: int = PrivateAttr(default=0)

    @property
    def n(self) -> int:
        return self._n

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> int:  # noqa: A002
        self._n += 1
        return self._n


class OneOnly(Counter):
    """Its copies are itself."""

    def __copy__(self) -> OneOnly:
        return self


class Forgetful(Counter):
    """Its copies, and what is pickled of it, know nothing."""

    def __init__(self) -> None:
        self.open = {"n": 0}

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> int:  # noqa: A002
        self.open["n"] += 1
        self.n = self.open["n"]
        return self.n


KINDS = [Counter, AsyncCounter, SlotCounter, ModelCounter, CheckedCounter, PrivateCounter, OneOnly, Forgetful]
COPIED = [kind for kind in KINDS if kind not in {OneOnly, Forgetful}]


def times(node: Any, runs: int = 3) -> list[Any]:
    return [node.invoke("go") for _ in range(runs)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_runnable_counts_on_under_the_decorator(kv, kind) -> None:
    """The original counts, and both tell it: whichever of them is run, decorated once or twice."""
    original = kind()
    plain_class = type(original)
    once, twice = kv.node(original), kv.node(kv.node(original))
    assert [1, 2, 3] == times(once)
    assert (3, 3) == (original.n, once.n)
    assert [4, 5] == [original.invoke("go"), twice.invoke("go")]
    assert (6, 6) == (once.invoke("go"), original.n)
    assert plain_class is type(original)
    assert isinstance(once, kind)


@pytest.mark.parametrize("kind", [Counter, ModelCounter, CheckedCounter])
def test_what_is_set_from_outside_reaches_the_runs(kv, kind) -> None:
    """On the original or on the decorated one."""
    original = kind()
    decorated = kv.node(original)
    original.n = 10
    assert 11 == decorated.invoke("go")
    decorated.n = 20
    assert 20 == original.n
    assert 21 == decorated.invoke("go")


@pytest.mark.parametrize("kind", COPIED)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_a_copy_counts_for_itself(kv, kind, copied) -> None:
    """As a copy of the plain one does, and it keeps the decorator."""
    decorated = kv.node(kind())
    times(decorated, 2)
    other = copied(decorated)
    assert [3, 4] == times(other, 2)
    assert ([3], [5]) == (times(decorated, 1), times(other, 1))
    assert (3, 5) == (decorated.n, other.n)


def test_a_model_copy_counts_for_itself(kv) -> None:
    """With the fields that it was given."""
    decorated = kv.node(ModelCounter())
    other = decorated.model_copy(update={"n": 10})
    assert ([11, 12], [1, 2]) == (times(other, 2), times(decorated, 2))


@pytest.mark.parametrize(
    "bound", [lambda one: one.with_config(tags=["t"]), lambda one: one.bind(word=1), lambda one: one.with_retry()]
)
def test_what_is_bound_to_it_counts_with_it(kv, bound) -> None:
    """`with_config`, `bind` and the like refer to the object itself."""
    original = Counter()
    assert [1, 2, 3] == times(bound(kv.node(original)))
    assert [4] == times(kv.node(bound(original)), 1)
    assert 4 == original.n


def test_coroutines_and_streams_count_too(kv) -> None:
    """Each of a class's own entries runs on the object."""
    original = AsyncCounter()
    decorated = kv.node(original)
    assert [1, 2] == [asyncio.run(decorated.ainvoke("go")), decorated.invoke("go")]
    assert [3, 4] == list(decorated.stream("go"))
    assert [5, 6] == sorted(decorated.batch(["go", "go"]))
    assert 6 == original.n


@pytest.mark.parametrize("decorate", [lambda kv, one: one, lambda kv, one: kv.node(one)], ids=["plain", "decorated"])
def test_langchains_own_scripted_models_go_on(kv, decorate) -> None:
    """`FakeListChatModel` and `GenericFakeChatModel`, alone, in a sequence, in a step of one, and in a graph."""
    prompt = ChatPromptTemplate.from_template("{q}")

    def model() -> Any:
        return FakeListChatModel(responses=["a", "b", "c"])

    alone = decorate(kv, model())
    assert ["a", "b", "c"] == [alone.invoke("?").text for _ in range(3)]
    assert "a" == "".join(chunk.text for chunk in alone.stream("?"))
    for chain in (decorate(kv, prompt | model()), prompt | decorate(kv, model())):
        assert ["a", "b"] == [chain.invoke({"q": "?"}).text for _ in range(2)]
        assert "c" == asyncio.run(chain.ainvoke({"q": "?"})).text
    other = decorate(kv, GenericFakeChatModel(messages=iter([AIMessage("x"), AIMessage("y")])))
    assert ["x", "y"] == [other.invoke("?").text for _ in range(2)]

    counter = Counter()
    told = decorate(kv, counter) | (lambda n: {"messages": [("user", str(n))]})
    graph = StateGraph(MessagesState)
    graph.add_node("count", told)
    graph.add_edge(START, "count")
    app = graph.compile()
    assert ["1", "2", "3"] == [app.invoke({"messages": []})["messages"][0].text for _ in range(3)]
    assert 3 == counter.n


def test_a_runnable_sees_itself(kv) -> None:
    """`self` in a run is the object that was decorated, of its own class."""
    seen = []

    class Curious(Runnable):
        def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:  # noqa: A002
            seen.append(self)
            return type(self)

    original = Curious()
    assert Curious is kv.node(original).invoke("go")
    assert seen[0] is original


@pytest.mark.parametrize("is_async", [False, True])
def test_a_decorated_tool_object_counts_in_the_one_that_was_decorated(kv, is_async) -> None:
    """A BaseTool with a field, and one with a private attribute."""

    class Own(BaseTool):
        name: str = "own"
        description: str = "Count."
        n: int = 0
        _m: int = PrivateAttr(default=0)

        def _run(self) -> int:
            self.n += 1
            self._m += 1
            return self._m

    original = Own()
    decorated = kv.tool_function(original)
    runs = [asyncio.run(decorated.ainvoke({})) if is_async else decorated.invoke({}) for _ in range(3)]
    assert [1, 2, 3] == runs
    assert (3, 3, 3) == (original.n, decorated.n, original._m)
    assert 4 == original.invoke({})
    assert Own is type(original)
