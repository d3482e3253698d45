"""Who is calling: inside graphs, subgraphs, fan-outs and threads, and outside of all of them."""

from __future__ import annotations

import operator
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Annotated, Any, TypedDict

import pytest
from agentkv_langgraph import ChatAgentKV, LangGraphHost
from agentkv_langgraph.budget import BudgetStop
from agentkv_langgraph.caller import RunKeys, branch_of
from langchain_core.runnables import RunnableConfig
from langgraph.errors import GraphDrained, GraphInterrupt, GraphRecursionError, ParentCommand
from langgraph.graph import START, StateGraph
from langgraph.types import Command, RetryPolicy, Send

from agentkv.core.task import Caller


class State(TypedDict):
    seen: Annotated[list[Any], operator.add]


def graph_of(*nodes: Any) -> Any:
    graph = StateGraph(State)
    before = START
    for node in nodes:
        graph.add_node(node)
        graph.add_edge(before, node.__name__)
        before = node.__name__
    return graph.compile()


@pytest.mark.parametrize(
    ("configurable", "task"),
    [({"thread_id": "t"}, "t"), ({"thread_id": "t", "agentkv_task_id": "mine"}, "mine"), ({"thread_id": 7}, "7")],
)
def test_a_task_is_named_by_its_own_key_before_its_thread(kv, configurable, task) -> None:
    """agentkv_task_id wins over thread_id; both are texts."""

    def node(state: State) -> State:
        return {"seen": [kv.caller()]}

    (caller,) = graph_of(node).invoke({"seen": []}, {"configurable": configurable})["seen"]
    assert Caller(task=task, node="node") == caller


def test_a_run_without_a_name_has_one_key_in_all_its_nodes_and_another_run_has_another(kv) -> None:
    """The root run is the task; its subgraphs belong to it."""

    def first(state: State) -> State:
        return {"seen": [kv.caller().task]}

    def second(state: State) -> State:
        return graph_of(first).invoke({"seen": []})

    app = graph_of(first, second)
    one, other = app.invoke({"seen": []})["seen"], app.invoke({"seen": []})["seen"]
    assert one[0] == one[1]
    assert other[0] == other[1] != one[0]
    assert one[0].startswith("run-")


def test_an_explicit_task_stands_above_the_thread(kv) -> None:
    """`with kv.task(...)` around a run names its calls."""

    def node(state: State) -> State:
        return {"seen": [kv.caller().task]}

    with kv.task("explicit"):
        assert ["explicit"] == graph_of(node).invoke({"seen": []}, {"configurable": {"thread_id": "t"}})["seen"]


def test_nodes_of_one_graph_share_a_branch_and_a_subgraph_run_has_its_own(kv) -> None:
    """A context continues from node to node; sub-agents have contexts of their own."""

    def inner_one(state: State) -> State:
        return {"seen": [kv.caller().branch]}

    def inner_two(state: State) -> State:
        return {"seen": [kv.caller().branch]}

    def outer(state: State) -> State:
        return {"seen": [kv.caller().branch]}

    graph = StateGraph(State)
    graph.add_node("sub", graph_of(inner_one, inner_two))
    graph.add_node(outer)
    graph.add_edge(START, "sub")
    graph.add_edge("sub", "outer")
    one, two, out = graph.compile().invoke({"seen": []})["seen"]
    assert one == two
    assert one.startswith("sub:")
    assert "" == out


def test_sent_tasks_have_a_branch_each(kv) -> None:
    """Fifty workers that run side by side do not take each other's sessions."""

    def worker(state: State) -> State:
        return {"seen": [kv.caller()]}

    graph = StateGraph(State)
    graph.add_node(worker)
    graph.add_conditional_edges(START, lambda _: [Send("worker", {"seen": []}) for _ in range(50)], ["worker"])
    callers = graph.compile().invoke({"seen": []}, {"configurable": {"thread_id": "t"}})["seen"]
    assert 50 == len({caller.branch for caller in callers})
    assert {("t", "worker")} == {(caller.task, caller.node) for caller in callers}


def test_a_retried_node_counts_its_attempts(kv) -> None:
    """attempt is 1, 2, 3 as LangGraph retries."""
    attempts = []

    def shaky(state: State) -> State:
        attempts.append(kv.caller().attempt)
        if len(attempts) < 3:
            raise ConnectionError
        return {"seen": []}

    graph = StateGraph(State)
    graph.add_node(shaky, retry_policy=RetryPolicy(max_attempts=3, initial_interval=0.001))
    graph.add_edge(START, "shaky")
    graph.compile().invoke({"seen": []})
    assert [1, 2, 3] == attempts


def test_outside_of_a_graph_nobody_is_calling_and_nothing_is_raised(kv) -> None:
    """A decorated node may be called directly, as unit tests do."""
    assert LangGraphHost().caller() is None
    assert "unattributed" == kv.caller().task

    @kv.node
    def node(state: State) -> str:
        return kv.caller().node

    assert "node" == node({"seen": []})


def test_a_users_own_threads_are_never_another_task(make_kv) -> None:
    """A plain thread is unattributed; a copied context and an explicitly passed config name the right task."""
    kv = make_kv()
    model = ChatAgentKV(kv)
    gate = threading.Barrier(4)

    def node(state: State, config: RunnableConfig) -> State:
        with ThreadPoolExecutor(3) as pool:
            plain = pool.submit(lambda: (gate.wait(), model.invoke("plain"))).result
            copied = pool.submit(copy_context().run, lambda: (gate.wait(), model.invoke("copied"))).result
            handed = pool.submit(lambda: (gate.wait(), model.invoke("handed", config))).result
            gate.wait()
            return {"seen": [plain()[1].text, copied()[1].text, handed()[1].text]}

    app = graph_of(node)
    for key in ("a", "b"):
        app.invoke({"seen": []}, {"configurable": {"thread_id": f"not-{key}", "agentkv_task_id": key}})
        assert 2 == len(kv.report(key).calls)
    assert 2 == len(kv.report("unattributed").calls)


def test_a_context_variable_of_one_node_does_not_leak_into_the_next(kv) -> None:
    """The node's name is its own, also when another graph of the same process runs beside it."""
    inside = threading.Event()

    @kv.node
    def slow(state: State) -> State:
        inside.wait(5)
        return {"seen": [kv.caller()]}

    @kv.node
    def quick(state: State) -> State:
        return {"seen": [kv.caller()]}

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(graph_of(slow).invoke, {"seen": []}, {"configurable": {"thread_id": "one"}})
        two = graph_of(quick).invoke({"seen": []}, {"configurable": {"thread_id": "two"}})
        inside.set()
        assert [Caller(task="one", node="slow")] == one.result()["seen"]
    assert [Caller(task="two", node="quick")] == two["seen"]


def test_a_node_that_is_given_a_name_is_called_by_it(kv) -> None:
    """Instead of the graph's name for it; the nodes of a graph inside keep theirs."""

    def inner(state: State) -> State:
        return {"seen": [kv.caller().node]}

    @kv.node(name="author")
    def node(state: State) -> State:
        return {"seen": [kv.caller().node, *graph_of(inner).invoke({"seen": []})["seen"], kv.caller().node]}

    assert ["author", "inner", "author"] == graph_of(node).invoke({"seen": []})["seen"]
    assert "author" == node({"seen": []})["seen"][0]


@pytest.mark.parametrize(
    ("error", "is_steering", "is_pause"),
    [
        (GraphInterrupt(), True, True),
        (GraphDrained("shutdown"), True, True),
        (ParentCommand(Command(goto="x")), True, False),
        (BudgetStop("spent", task="t", limit="tokens", allowed=1, used=1, asked=1), False, False),
        (GraphRecursionError(), False, False),
        (ValueError(), False, False),
        (KeyboardInterrupt(), False, False),
    ],
)
def test_steering_is_told_from_failure_and_a_pause_from_a_hand_over(error, is_steering, is_pause) -> None:
    """LangGraph's control flow is Exceptions by type, but none is a failure; after a pause the node runs again."""
    assert is_steering is LangGraphHost().is_control_flow(error)
    assert is_pause is LangGraphHost().is_pause(error)


@pytest.mark.parametrize(
    ("namespace", "path", "branch"),
    [
        ("", None, ""),
        ("plan:0f5c", ("__pregel_pull", "plan"), ""),
        ("sub:0123456789abcdef|plan:77", ("__pregel_pull", "plan"), "sub:89abcdef"),
        ("worker:0123456789abcdef", ("__pregel_push", 0), "worker:89abcdef"),
        ("sub:0123456789abcdef|1|plan:77", None, "sub:89abcdef|1"),
    ],
)
def test_branches_leave_out_what_changes_with_every_step(namespace, path, branch) -> None:
    """The node's own part goes, the runs around it stay."""
    assert branch == branch_of(namespace, path)


def test_run_keys_are_stable_and_forget_the_oldest() -> None:
    """A run in use keeps its key while others come and go."""
    keys, run = RunKeys(keep=3), object()
    key = keys.of(run)
    for _ in range(10):
        keys.of(object())
        assert key == keys.of(run)
    assert 3 == len(keys._runs)


def test_finding_the_caller_is_quick(kv) -> None:
    """Twenty microseconds at most (here: ten times that, for a busy machine)."""
    best_us = []

    def node(state: State) -> State:
        for _ in range(5):
            started_s = time.perf_counter()
            for _ in range(200):
                LangGraphHost().caller()
            best_us.append((time.perf_counter() - started_s) / 200 * 1e6)
        return {"seen": []}

    graph_of(node).invoke({"seen": []}, {"configurable": {"thread_id": "t"}})
    assert min(best_us) < 200
