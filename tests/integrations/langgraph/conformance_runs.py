"""One cell of the matrix: build a graph around a node, drive it, and write down all that anybody could see of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

import pytest
from conformance_nodes import Body, Outcome, State, make_node, subgraph
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import END, START, StateGraph
from langgraph.pregel._call import identifier
from langgraph.store.memory import InMemoryStore
from langgraph.types import CachePolicy, Command, RetryPolicy, StateSnapshot

MODES = ("values", "updates", "messages", "custom", "tasks", "debug", "checkpoints")
FIRST = ("function", "async function", "subgraph")
Decorate = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One combination."""

    kind: str
    outcome: Outcome = "return"
    drive: str = "invoke"
    signature: str = "state"
    modes: tuple[str, ...] | str | None = None

    def __str__(self) -> str:
        modes = self.modes if isinstance(self.modes, str) else "all" if self.modes else ""
        parts = [self.kind, self.signature if self.signature != "state" else "", self.outcome, self.drive, modes]
        return "-".join(part for part in parts if part)


@dataclass(slots=True, kw_only=True)
class Seen:
    """What one run of a cell showed."""

    events: list[Any] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    callbacks: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    runs: int = 0


def params(cells: list[Cell]) -> list[Any]:
    """The cells for parametrize; those that differ from a quick one in the way to run alone are slow."""
    quick = {"invoke", "astream", "astream_events"}
    return [
        pytest.param(cell, id=str(cell), marks=() if cell.drive in quick or cell.kind in FIRST else pytest.mark.slow)
        for cell in cells
    ]


class Recorder(BaseCallbackHandler):
    """The names of all runs as they start, end and fail."""

    run_inline = True

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def on_chain_start(self, serialized, inputs, *, name=None, tags=None, **kwargs) -> None:
        self.heard.append(("start", name, sorted(tags or ()), repr(inputs)))

    def on_chain_end(self, outputs, *, tags=None, **kwargs) -> None:
        self.heard.append(("end", sorted(tags or ()), repr(outputs)))

    def on_chain_error(self, error, *, tags=None, **kwargs) -> None:
        self.heard.append(("error", sorted(tags or ()), repr(error)))

    def on_chat_model_start(self, serialized, messages, *, metadata=None, **kwargs) -> None:
        self.heard.append(("model", sorted({*(metadata or ())} - {"tags"})))  # LangChain tells tags at times


def built(cell: Cell, body: Body, decorate: Decorate, saver: Any) -> Any:
    """The graph of a cell, compiled."""
    node = decorate(make_node(cell.kind, body, cell.signature))
    graph = StateGraph(State)
    options: dict[str, Any] = {}
    if cell.outcome == "retry":
        options["retry_policy"] = RetryPolicy(max_attempts=3, initial_interval=0.001, jitter=False)
    if cell.outcome == "cache":
        options["cache_policy"] = CachePolicy(key_func=lambda state: "same")
    if cell.outcome == "timeout":
        options["timeout"] = 20.0 if cell.kind == "subgraph" else 0.1  # a sub-graph here is quick, the others hang
    if cell.outcome == "parent":
        options["destinations"] = ("target",)
        graph.add_node("outer", node if "subgraph" in cell.kind else subgraph(node), **options)
        graph.add_node("target", _says("target"))
        graph.add_edge(START, "outer")
    else:
        graph.add_node("node", node, **options)
        graph.add_edge(START, "node")
    if cell.outcome == "goto":
        graph.add_node("left", _says("left"))
        graph.add_node("right", _says("right"))
    elif cell.outcome == "send":
        graph.add_node("worker", decorate(_says("worker")))
    elif cell.outcome != "parent":
        graph.add_node("after", _says("after"))
        graph.add_edge("node", "after")
        graph.add_edge("after", END)
    cache = InMemoryCache() if cell.outcome == "cache" else None
    return graph.compile(checkpointer=saver, store=InMemoryStore(), cache=cache, name="cell")


def _says(word: str) -> Callable[[State], Any]:
    def says(state: State) -> Any:
        return {"seen": [(word, len(state["seen"]))]}

    return says


def in_memory(_runner: asyncio.Runner) -> Any:
    """A checkpointer in memory; others take the runner, because an asynchronous one belongs to a loop."""
    return nullcontext(InMemorySaver())


def observe(
    cell: Cell,
    decorate: Decorate,
    *,
    in_scope: Callable[[], bool],
    savers: Callable[[asyncio.Runner], AbstractContextManager[Any]] = in_memory,
    attach: Decorate = lambda graph: graph,
) -> tuple[Seen, Body]:
    """Run the cell once, from building to the last snapshot. What it raises is part of what is seen."""
    body, seen, recorder = Body(cell.outcome, in_scope), Seen(), Recorder()
    with asyncio.Runner() as runner, savers(runner) as saver, _noting(seen):
        graph = attach(built(cell, body, decorate, saver))
        config = {"configurable": {"thread_id": "cell"}, "callbacks": [recorder], "recursion_limit": 8}
        drive = _Drive(runner=runner, cell=cell, graph=graph, config=config, seen=seen, body=body)
        for step in _inputs(cell.outcome):
            with _noting(seen):
                drive.run(step)
            if saver is not None:
                seen.states.append(drive.snapshots())
    seen.runs = len(body.scopes)
    seen.callbacks = recorder.heard
    if cell.outcome == "send":  # workers run side by side, so that names by order differ
        seen.events = sorted(map(_nameless, seen.events), key=repr)
        seen.callbacks = sorted(map(_nameless, seen.callbacks), key=repr)
        seen.states = [_nameless(repr(state)) for state in seen.states]
    return _plain(seen), body


def structure(cell: Cell, decorate: Decorate) -> dict[str, Any]:
    """What LangGraph reads off the graph without running it."""
    graph = built(cell, Body(cell.outcome, bool), decorate, None)
    return {
        "drawing": graph.get_graph(xray=True).to_json(),
        "picture": graph.get_graph().draw_mermaid(),
        "nodes": {name: repr(node.input_schema) for name, node in graph.builder.nodes.items()},
        "ends": {name: node.ends for name, node in graph.builder.nodes.items()},
        "subgraphs": [name for name, _ in graph.get_subgraphs()],
        "input": graph.get_input_jsonschema(),
        "output": graph.get_output_jsonschema(),
        "context": graph.get_context_jsonschema(),
        "identifiers": [identifier(node) for node in graph.nodes.values()],
    }


def _inputs(outcome: Outcome) -> list[Any]:
    first = {"seen": ["asked"], "messages": []}
    match outcome:
        case "interrupt":
            return [first, Command(resume="yes"), Command(resume="again")]
        case "cache":
            return [first, first]
    return [first]


@contextmanager
def _noting(seen: Seen) -> Iterator[None]:
    try:
        yield
    except Warning:
        raise
    except (Exception, asyncio.CancelledError) as error:
        chain = [error, error.__cause__, error.__context__]
        seen.errors.append([(type(one).__name__, str(one), getattr(one, "__notes__", None)) for one in chain if one])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drive:
    """How a cell's graph is run and asked."""

    runner: asyncio.Runner
    cell: Cell
    graph: Any
    config: Any
    seen: Seen
    body: Body

    def run(self, step: Any) -> None:
        modes = self.cell.modes
        given = {} if modes is None else {"stream_mode": modes if isinstance(modes, str) else [*modes]}
        if self.cell.drive == "invoke":
            self.seen.events.append(self.graph.invoke(step, self.config, **given))
        elif self.cell.drive == "stream":
            self.seen.events.extend(self.graph.stream(step, self.config, subgraphs=True, **given))
        else:
            run = self._cancelled if self.cell.outcome == "cancel" else self._arun
            self.runner.run(run(step, given))

    async def _arun(self, step: Any, given: Any) -> None:
        if self.cell.drive == "ainvoke":
            self.seen.events.append(await self.graph.ainvoke(step, self.config, **given))
            return
        if self.cell.drive == "astream_events":
            stream = self.graph.astream_events(step, self.config, version="v2")
        else:
            stream = self.graph.astream(step, self.config, subgraphs=True, **given)
        async for event in stream:
            self.seen.events.append(event)

    async def _cancelled(self, step: Any, given: Any) -> None:
        running = asyncio.create_task(self._arun(step, given))
        await asyncio.to_thread(self.body.started.wait, 5)
        told, still = -1, 0
        while still < 3:  # what the start of the node caused has been streamed
            still = still + 1 if told == len(self.seen.events) else 0
            told = len(self.seen.events)
            await asyncio.sleep(0.01)
        running.cancel()
        try:
            await running
        finally:
            self.body.released.set()

    def snapshots(self) -> Any:
        """The state and its history."""
        if self.cell.drive in {"invoke", "stream"}:
            history = self.graph.get_state_history(self.config)
            return [self.graph.get_state(self.config, subgraphs=True), *history]

        async def ask() -> Any:
            history = [one async for one in self.graph.aget_state_history(self.config)]
            return [await self.graph.aget_state(self.config, subgraphs=True), *history]

        return self.runner.run(ask())


_RUN = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\b[0-9a-f]{32}\b|0x[0-9a-f]{8,}")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+(\+00:00|Z)?|elapsed: [\d.]+s")


def _nameless(value: Any) -> str:
    return _RUN.sub("<run>", _TIME.sub("<time>", repr(value)))


def _plain(seen: Seen) -> Seen:
    """The same with names of runs by their order, and without clocks."""
    names: dict[str, str] = {}

    def text(value: str) -> str:
        value = _TIME.sub("<time>", value)
        return _RUN.sub(lambda found: names.setdefault(found[0], f"<run {len(names)}>"), value)

    def plain(value: Any) -> Any:  # noqa: PLR0911  one for each type
        match value:
            case str():
                return text(value)
            case None | bool() | int():
                return value
            case float():
                return "<float>"
            case dict():
                return {plain(k): plain(v) for k, v in value.items() if k not in {"callbacks", "ls_integration"}}
            case StateSnapshot():
                return plain(value._asdict())
            case list() | tuple():
                return [plain(one) for one in value]
            case BaseMessage():
                return [type(value).__name__, plain(value.model_dump())]
            case _ if is_dataclass(value) and not isinstance(value, type):
                return [type(value).__name__, plain(asdict(value))]
        return text(repr(value))

    return Seen(**{name: plain(getattr(seen, name)) for name in Seen.__slots__})
