"""Who is calling, read from what LangGraph keeps about the running node.

Covers: task, branch, node and attempt from a runnable config or from a run's metadata. Does not cover: an explicit
`with kv.task(...)`, which stands above all this and lives in the runtime.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from agentkv.core.task import UNATTRIBUTED, Caller

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


run_keys = RunKeys()


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


def named_in_metadata(config: Mapping[str, Any] | None) -> dict[str, Any]:
    """`config` with its task's key in the metadata, where a model call made from any thread can read it."""
    told = dict(config or _NOTHING)
    caller = caller_of_config(told)
    if caller is not None and caller.task != UNATTRIBUTED:
        told["metadata"] = {**(told.get("metadata") or _NOTHING), TASK_KEY: caller.task}
    return told


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


def _callback_root(config: Mapping[str, Any]) -> str | None:
    """The root run's key as an attached AgentKVCallback saw it, so that both bill under one name."""
    manager = config.get("callbacks")
    parent = getattr(manager, "parent_run_id", None)
    if parent is None:
        return None
    for handler in getattr(manager, "handlers", ()):
        find = getattr(handler, "agentkv_root_of", None)
        if find is not None:
            root: str | None = find(parent)
            return root
    return None
