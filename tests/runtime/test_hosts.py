"""The plain host's node wrapper: every kind of callable behaves as before."""

from __future__ import annotations

import functools
import inspect

import pytest
from agentkv_langgraph import LangGraphHost

from agentkv.core.host import Host
from agentkv.runtime.hosts import PlainHost


class Watch:
    """Enter and leave hooks that write down what they see."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def enter(self) -> str:
        self.seen.append("enter")
        return "token"

    def leave(self, token: object, error: BaseException | None) -> None:
        self.seen.append((token, type(error).__name__))

    def wrap(self, fn):
        return PlainHost().wrap_node(fn, self.enter, self.leave)


ONCE = ["enter", ("token", "NoneType")]


def add(state: int, *, by: int = 1) -> int:
    """Adds."""
    return state + by


class Adder:
    def __call__(self, state: int) -> int:
        return state + 1

    def method(self, state: int) -> int:
        return state + 1


class AsyncAdder:
    async def __call__(self, state: int) -> int:
        return state + 1


def test_a_function_keeps_its_name_signature_and_result():
    """What a framework reads by inspection is unchanged."""
    watch = Watch()
    wrapped = watch.wrap(add)
    assert ("add", "Adds.", inspect.signature(add)) == (wrapped.__name__, wrapped.__doc__, inspect.signature(wrapped))
    assert 3 == wrapped(1, by=2)
    assert watch.seen == ONCE


@pytest.mark.parametrize("fn", [Adder(), Adder().method, functools.partial(add, by=1), lambda state: state + 1])
def test_other_callables_run_inside_the_hooks(fn):
    """Objects, bound methods, partials and lambdas."""
    watch = Watch()
    assert 2 == watch.wrap(fn)(1)
    assert watch.seen == ONCE


async def _async_add(state: int) -> int:
    return state + 1


@pytest.mark.parametrize("fn", [_async_add, AsyncAdder(), AsyncAdder().__call__, functools.partial(_async_add)])
async def test_coroutines_stay_coroutines(fn):
    """The hooks span the await, not the creation of the coroutine."""
    watch = Watch()
    wrapped = watch.wrap(fn)
    assert inspect.iscoroutinefunction(wrapped)
    pending = wrapped(1)
    assert watch.seen == []
    assert 2 == await pending
    assert watch.seen == ONCE


def test_generators_stay_lazy_and_return_their_value():
    """A generator node runs when it is iterated; `return` and `send` pass through."""

    def numbers(n: int):
        got = yield n
        yield got
        return "end"

    watch = Watch()
    generator = watch.wrap(numbers)(5)
    assert watch.seen == []
    assert (5, 7) == (next(generator), generator.send(7))
    with pytest.raises(StopIteration) as stop:
        next(generator)
    assert "end" == stop.value.value
    assert watch.seen == ONCE


async def test_async_generators_stream():
    """An async generator is closed with its wrapper."""
    closed = []

    async def numbers(n: int):
        try:
            for i in range(n):
                yield i
        finally:
            closed.append(True)

    watch = Watch()
    assert [0, 1, 2] == [item async for item in watch.wrap(numbers)(3)]
    assert watch.seen == ONCE
    stopped = watch.wrap(numbers)(3)
    assert 0 == await anext(stopped)
    await stopped.aclose()
    assert [True, True] == closed


def test_an_exception_passes_as_the_same_object():
    """Nothing is wrapped, chained or swallowed."""
    error = KeyError("mine")

    def broken(_state: int) -> None:
        raise error

    watch = Watch()
    with pytest.raises(KeyError) as caught:
        watch.wrap(broken)(1)
    assert error is caught.value
    assert watch.seen == ["enter", ("token", "KeyError")]


@pytest.mark.parametrize("make", [PlainHost, LangGraphHost])
def test_each_host_has_what_the_protocol_names_and_nothing_else(make):
    """With the same parameters, so that a new framework's host is written from the protocol alone."""

    def of(one):
        functions = {name: value for name, value in vars(one).items() if inspect.isfunction(value) and name[0] != "_"}
        return {name: list(inspect.signature(value).parameters) for name, value in functions.items()}

    assert of(Host) == of(make)
    assert isinstance(make().name, str)


def test_a_host_of_no_framework_knows_no_tools_of_one_and_nobody_to_keep_awake():
    """What it is asked about is passed on or ignored."""
    host = PlainHost()
    assert host.wrap_tool(object(), None, None) is None
    assert host.alive() is None
