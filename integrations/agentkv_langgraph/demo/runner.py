"""Running the tasks: one thread each, all ended together when the demo is stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from langchain_core.messages import AIMessage

from agentkv import log
from agentkv.budget.limits import Budget
from agentkv.errors import BudgetExceeded, GenerationCancelled
from agentkv_langgraph.demo.board import Board, Line
from agentkv_langgraph.demo.graph import State
from agentkv_langgraph.demo.tools import Stopped


class Crew:
    """Threads that run one job each; what a job raises is kept, not lost."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self.errors: dict[str, BaseException] = {}

    def start(self, name: str, job: Callable[[], None]) -> None:
        """Run `job` in a thread of its own."""

        def run() -> None:
            try:
                job()
            except BaseException as error:
                self.errors[name] = error

        thread = threading.Thread(target=run, name=f"agentkv-demo-{name}")
        self._threads.append(thread)
        thread.start()

    @property
    def busy(self) -> bool:
        """True while a job runs."""
        return any(thread.is_alive() for thread in self._threads)

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the jobs, each at most `timeout_s`."""
        for thread in self._threads:
            thread.join(timeout_s)


def run_task(kv: Any, graph: Any, state: State, *, line: Line, board: Board, budget: Budget) -> None:
    """Run one task's graph to its end, or to the end of its budget, and keep its line on the board."""
    config = {"configurable": {"thread_id": line.key}, "recursion_limit": 3 * len(state["todo"]) + 10}
    todo = list(state["todo"])
    try:
        with kv.task(line.key, budget=budget):
            for event in graph.stream(state, config, stream_mode="tasks"):
                if "input" in event:
                    running = todo[line.tools_done]["command"] if event["name"] == "run_tool" else ""
                    board.entered(line, event["name"], running)
                elif event["error"] is None:
                    _note_result(line, board, event)
        board.over(line)
    except BudgetExceeded as error:
        board.over(line, f"stopped by its budget ({error.used:,.0f} of {error.allowed:,.0f} tokens used)")
    except (Stopped, GenerationCancelled):
        board.over(line, "stopped")
    except BaseException as error:
        log.failed("demo_task_failed", task=line.key, error=repr(error))
        board.over(line, f"failed: {error}")
        raise


def _note_result(line: Line, board: Board, event: dict[str, Any]) -> None:
    line.tools_done += event["name"] == "run_tool"
    messages = (event["result"] or {}).get("messages", ())
    for message in messages:
        if isinstance(message, AIMessage):
            board.answered(line, message)
