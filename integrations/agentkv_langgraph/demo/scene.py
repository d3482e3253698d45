"""One demo: its settings, its run with tiers, and the same work again without them.

Does not cover options and exit codes (`command.py`), nor how anything looks (`view.py`, `closing.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from agentkv.budget.limits import Budget
from agentkv.policy import make_policy
from agentkv_langgraph.chat import ChatAgentKV
from agentkv_langgraph.demo import board as boards
from agentkv_langgraph.demo import chronicle
from agentkv_langgraph.demo.closing import Outcome
from agentkv_langgraph.demo.graph import build_graph, first_state
from agentkv_langgraph.demo.interrupts import remembered
from agentkv_langgraph.demo.project import Project, sample_project, user_project
from agentkv_langgraph.demo.record import Recorder, Step, replay_task
from agentkv_langgraph.demo.runner import Crew, run_task
from agentkv_langgraph.demo.settings import MakeKV, Settings
from agentkv_langgraph.demo.tools import run_tool
from agentkv_langgraph.demo.view import watch
from agentkv_langgraph.demo.worklist import WorkItem, goal, work_list

ANSWER_TOKENS = 48
_LISTED_FILES = 30
_JOIN_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """What a run leaves for its replay: the steps of each task, by key, and the tasks' titles."""

    steps: Mapping[str, list[Step]]
    titles: Mapping[str, str]


def perform(
    make_kv: MakeKV, settings: Settings, folder: Path, console: Console, *, record: Path | None = None
) -> tuple[Outcome, Recording]:
    """Run all tasks on a tiered AgentKV, and write what really happened to `record`. Ends every tool and call before
    it raises.
    """
    project = user_project(settings.repo, folder) if settings.repo else sample_project(folder)
    stamp = time.strftime("%m%d-%H%M%S")
    titles = {f"demo-{stamp}-{n}": f"task {n}" for n in range(1, settings.tasks + 1)}
    plans = [
        work_list(project, task_index=index, turns=settings.turns, seed=settings.seed)
        for index in range(settings.tasks)
    ]
    lines = [
        boards.Line(key=key, title=title, tools_total=settings.turns, budget_tokens=settings.budget_tokens)
        for key, title in titles.items()
    ]
    board, stop, crew = boards.Board(lines), threading.Event(), Crew()
    with remembered() as interrupts, make_kv(tiers=True, policy=settings.policy) as kv:
        recorder, receipts = Recorder(kv), chronicle.Receipts(kv)
        started_s = time.monotonic()
        with _ended_together(crew, recorder, stop):
            for index, (line, todo) in enumerate(zip(lines, plans, strict=True)):
                graph = _agent(recorder, project, settings, stop, seed=settings.seed + index)
                state = first_state(instructions=instructions(project), goal=goal(index), todo=todo)
                budget = Budget(tokens=settings.budget_tokens)
                job = partial(run_task, recorder, graph, state, line=line, board=board, budget=budget)
                crew.start(line.title, job)

            def busy() -> bool:
                interrupts.check()
                return crew.busy

            watch(console, board, kv, busy, "agentkv demo")
        outcome = _outcome(kv, titles, started_s)
    _raise_first(crew)
    if record is not None:
        run = chronicle.Run(
            bills=outcome.bills,
            receipts=receipts,
            stats=outcome.stats,
            model=kv.engine.model,
            policy=settings.policy_named,
        )
        chronicle.write(record, run)
    return outcome, Recording(steps=recorder.steps, titles=titles)


def perform_again(
    make_kv: MakeKV, settings: Settings, recording: Recording, console: Console, *, tiers: bool
) -> Outcome:
    """Repeat the recorded work, tools as sleeps; with `tiers` off, what is evicted is computed again."""
    stop, crew = threading.Event(), Crew()
    policy = settings.policy if tiers else make_policy("keep")
    word = "on" if tiers else "off"
    with remembered() as interrupts, make_kv(tiers=tiers, policy=policy, saved=False) as kv:
        recorder = Recorder(kv)
        started_s = time.monotonic()
        with _ended_together(crew, recorder, stop):
            for key, title in recording.titles.items():
                crew.start(title, partial(replay_task, recorder, key, list(recording.steps.get(key, ())), stop))
            with console.status(f"the same work again, with offload {word} ..."):
                while crew.busy:
                    interrupts.check()
                    crew.join(0.2)
        outcome = _outcome(kv, recording.titles, started_s)
    _raise_first(crew)
    return outcome


def instructions(project: Project) -> str:
    """The system message: the same bytes for every task, so that its blocks are computed once and shared."""
    files = "\n".join(f"- {path}" for path in sorted(project.files)[:_LISTED_FILES])
    return (
        "You are a careful software engineer. Commands are run for you on a code base, one at a time, and you are "
        "shown what they print. After each one you say in one or two sentences what it tells us, and you name files, "
        "functions and numbers rather than talking in general. Long output is cut in the middle. You never invent "
        "output that you were not shown, and you never repeat what you have said before.\n\n"
        f"The code base is called {project.root.name}. Its files are:\n{files}"
    )


def _agent(recorder: Any, project: Project, settings: Settings, stop: threading.Event, *, seed: int) -> Any:
    def run(item: WorkItem) -> str:
        output = run_tool(item["argv"], cwd=project.root, env=project.env, timeout_s=settings.tool_timeout_s, stop=stop)
        return output.replace(str(project.root), ".")

    model = ChatAgentKV(recorder, max_tokens=ANSWER_TOKENS, temperature=0.7, top_p=0.9, seed=seed)
    return build_graph(recorder, model=model, run=run)


@contextmanager
def _ended_together(crew: Crew, recorder: Recorder, stop: threading.Event) -> Iterator[None]:
    """Whatever happens inside: afterwards no task runs, no tool and no model call."""
    try:
        yield
    finally:
        if crew.busy:
            stop.set()
            recorder.stop()
        crew.join(_JOIN_S)


def _outcome(kv: Any, titles: Mapping[str, str], started_s: float) -> Outcome:
    bills = {title: kv.report(key) for key, title in titles.items()}
    return Outcome(bills=bills, wall_s=time.monotonic() - started_s, stats=kv.stats())


def _raise_first(crew: Crew) -> None:
    for error in crew.errors.values():
        raise error
