"""Who is calling, read from what LangGraph keeps about the running node.

Covers: task, branch, node and attempt from a runnable config or from a run's metadata. Does not cover: an explicit
`with kv.task(...)`, which stands above all this and lives in the runtime.
"""

from __future__ import annotations

import threading
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from agentkv.core.task import UNATTRIBUTED, Caller
from agentkv.runtime.identity import around_runs

TASK_KEY = "agentkv_task_id"
_RUNTIME_KEY = "__pregel_runtime"  # LangGraph's own constant for the Runtime it injects into nodes
_PUSHED = "__pregel_push"  # first element of a path whose task was sent (Send), not triggered by an edge
_THREAD = "thread="  # how the branch of a sub-agent with a thread of its own begins
_NOTHING: Mapping[str, Any] = {}


class RunKeys:
    """A key for every graph run that brings no name of its own.

    LangGraph hands one control object to a run and to all its subgraphs. The last `keep` of them are held, so that
    an `id()` cannot come back as another run's while its key is known.
    """

    def __init__(self, keep: int = 4096) -> None:
        self._keep = keep
        self._runs: OrderedDict[int, tuple[Any, str]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, control: Any) -> str:
        """The key of the run that owns `control`."""
        with self._lock:
            known = self._runs.get(id(control))
            if known is not None:
                self._runs.move_to_end(id(control))
                return known[1]
            key = f"run-{uuid.uuid4().hex[:12]}"
            self._runs[id(control)] = (control, key)
            if len(self._runs) > self._keep:
                self._runs.popitem(last=False)
            return key


class RunTasks:
    """The tasks of graph runs that lie in a `with kv.task(...)`, which no config tells of; of the last `keep` runs."""

    def __init__(self, keep: int = 1024) -> None:
        self._keep = keep
        self._tasks: OrderedDict[tuple[int, int], tuple[Any, weakref.ref[Any], str]] = OrderedDict()
        self._lock = threading.Lock()

    def seen(self, control: Any, owner: Any, task: str) -> None:
        """In the run that owns `control` a call of `owner` is one of `task`."""
        key = id(control), id(owner)
        if key not in self._tasks:
            with self._lock:
                self._tasks[key] = control, weakref.ref(owner), task
                while len(self._tasks) > self._keep:
                    self._tasks.popitem(last=False)

    def of(self, control: Any, owner: Any) -> str | None:
        """The task of a run that was seen before."""
        with self._lock:
            _, known_owner, task = self._tasks.get((id(control), id(owner)), (None, None, None))
        return task if known_owner is not None and known_owner() is owner else None


run_keys = RunKeys()
run_tasks = RunTasks()


def caller_of_running(config: Mapping[str, Any]) -> Caller | None:
    """`caller_of_config` for what runs here and now: it is remembered whose run it is."""
    control = _control_of(config)
    if control is not None:
        for owner, task in around_runs():
            run_tasks.seen(control, owner, task)
    return caller_of_config(config)


def caller_of_config(config: Mapping[str, Any]) -> Caller | None:
    """The caller that a runnable config describes; None if it names no task and belongs to no graph run.

    A graph that is run inside of another one's node on a thread of its own is a sub-agent: LangGraph hands the outer
    run's thread on in the metadata, and that names the task; the sub-agent's thread names the branch.
    """
    conf = config.get("configurable") or _NOTHING
    metadata = config.get("metadata") or _NOTHING
    runtime = conf.get(_RUNTIME_KEY)
    info = getattr(runtime, "execution_info", None)
    own, outermost = conf.get("thread_id"), metadata.get("thread_id")
    task = conf.get(TASK_KEY) or metadata.get(TASK_KEY) or outermost or own
    task = task or getattr(info, "run_id", None) or _callback_root(config)
    if not task and (control := getattr(runtime, "control", None)) is not None:
        task = run_keys.of(control)
    if not task:
        return None
    branch = branch_of(conf.get("checkpoint_ns") or "", metadata.get("langgraph_path"))
    if own and outermost and own != outermost:
        branch = f"{_THREAD}{str(own).replace('|', '_')}" + (f"|{branch}" if branch else "")
    return Caller(
        task=str(task),
        branch=branch,
        node=metadata.get("langgraph_node") or "",
        attempt=getattr(info, "node_attempt", 1),
    )


def caller_of_metadata(metadata: Mapping[str, Any] | None) -> Caller | None:
    """The caller that a run's metadata describes: all that a callback or a foreign thread gets to see."""
    metadata = metadata or _NOTHING
    task = metadata.get(TASK_KEY) or metadata.get("thread_id")
    if not task:
        return None
    branch = branch_of(metadata.get("langgraph_checkpoint_ns") or "", metadata.get("langgraph_path"))
    return Caller(task=str(task), branch=branch, node=metadata.get("langgraph_node") or "")


def named_in_metadata(config: Mapping[str, Any] | None, owner: Any) -> dict[str, Any]:
    """`config` with its task's key in the metadata, where a model call made from any thread can read it.

    A run that lies in a scope of `owner`'s is that task's, if that was seen.
    """
    told = dict(config or _NOTHING)
    more = metadata_of(told, owner)
    if more:
        told["metadata"] = {**(told.get("metadata") or _NOTHING), **more}
    return told


def metadata_of(config: Mapping[str, Any], owner: Any) -> dict[str, str]:
    """What `named_in_metadata` adds."""
    caller = caller_of_config(config)
    task = _seen_task(config, owner) or (UNATTRIBUTED if caller is None else caller.task)
    return {TASK_KEY: task} if task != UNATTRIBUTED else {}


def branch_of(namespace: str, path: Any = None) -> str:
    """The line of control that a node runs in: "" for a graph's own nodes, one name per subgraph run or sent task.

    A namespace is `node:uuid` parts joined by "|". Nodes of one graph continue one context, so the last part, which
    changes with every step, is left out unless the task was sent on its own (then siblings run beside it).
    """
    parts = namespace.split("|") if namespace else []
    sent = isinstance(path, tuple | list) and bool(path) and path[0] == _PUSHED
    kept = parts if sent else parts[:-1]
    return "|".join(_short(part) for part in kept)


def _short(part: str) -> str:
    name, colon, run = part.partition(":")
    return f"{name}:{run[-8:]}" if colon else part


def _control_of(config: Mapping[str, Any]) -> Any:
    return getattr((config.get("configurable") or _NOTHING).get(_RUNTIME_KEY), "control", None)


def _callback_root(config: Mapping[str, Any]) -> str | None:
    """The root run's key as an attached AgentKVCallback saw it, so that both bill under one name."""
    manager = config.get("callbacks")
    parent = getattr(manager, "parent_run_id", None)
    ours = (find for handler in _handlers(manager) if (find := getattr(handler, "agentkv_root_of", None)))
    find = None if parent is None else next(ours, None)
    root: str | None = None if find is None else find(parent)
    return root


def _seen_task(config: Mapping[str, Any], owner: Any) -> str | None:
    """The task of the run that the config is of, as the owner's callback saw it, or as a call inside of it did."""
    manager = config.get("callbacks")
    parent = getattr(manager, "parent_run_id", None)
    for handler in () if parent is None else _handlers(manager):
        find = getattr(handler, "agentkv_task_of", None)
        if find is not None and (task := find(parent, owner)) is not None:
            return str(task)
    control = _control_of(config)
    return None if control is None else run_tasks.of(control, owner)


def _handlers(manager: Any) -> Any:
    return getattr(manager, "handlers", ())
