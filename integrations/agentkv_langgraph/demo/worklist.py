"""What each task does: a list of tool calls built from the code base, different for every task.

A small model cannot be trusted to choose tools, so the graph walks this list and the model writes what it makes of
each result. Items are plain JSON values, so that they may stand in graph state.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle, islice
from typing import TypedDict

from agentkv.errors import ConfigError
from agentkv_langgraph.demo.project import Project

GOALS = (
    "Find out why tests fail and name the function at fault.",
    "Review the code for bugs that the tests do not show.",
    "Judge whether this code base is ready for a release.",
    "Find the slowest tests and say what makes them slow.",
    "Clean up: list what the linter finds and what should be fixed first.",
    "Explain to a new colleague what the modules do and which of them are broken.",
)
_PATTERN = ("read", "test_file", "test_suite", "grep", "lint", "read", "test_file", "test_suite", "log")
_WORDS = ("def ", "raise ", "return ", "import ", "class ")


class WorkItem(TypedDict):
    """One tool call: the tool's name for forecasts and bills, the program, and the command as the model sees it."""

    tool: str
    argv: list[str]
    command: str


def goal(task_index: int) -> str:
    """What the task with this number is for."""
    return GOALS[task_index % len(GOALS)]


def work_list(project: Project, *, task_index: int, turns: int, seed: int) -> list[WorkItem]:
    """`turns` tool calls for one task. Raises ConfigError if no tool can be run on this code base."""
    rng = random.Random(f"{seed}/{task_index}")  # noqa: S311  variety, not secrets
    sources = _sources(project, rng)
    steps = [sources[kind] for kind in _PATTERN if kind in sources]
    if not steps:
        raise ConfigError(f"{project.root}: no Python files, no pytest, no ruff and no git: nothing to work on")
    start = (2 * task_index) % len(steps)
    return [next(step) for step in islice(cycle(steps[start:] + steps[:start]), turns)]


def _sources(project: Project, rng: random.Random) -> dict[str, Iterator[WorkItem]]:
    """An endless supply of items for each kind of work that is possible here."""
    found: dict[str, Iterator[WorkItem]] = {}
    if files := project.sources or project.files:
        found["read"] = _endless(files, rng, lambda path: _item("read_file", ["cat", path], f"cat {path}"))
    if project.python is not None and project.tests:
        pytest = [project.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
        found["test_file"] = _endless(
            project.tests, rng, lambda path: _item("test_file", [*pytest, path], f"pytest -q {path}")
        )
        found["test_suite"] = cycle([_item("test_suite", [*pytest, "--durations=3"], "pytest -q --durations=3")])
    if project.git is not None:
        git = [project.git, "-C", str(project.original)]
        log = ["log", "--oneline", "--stat", "-n", "8"]
        found["log"] = cycle([_item("git_log", [*git, *log], f"git {' '.join(log)}")])
        found["grep"] = _endless(
            _WORDS, rng, lambda word: _item("git_grep", [*git, "grep", "-n", word], f"git grep -n '{word}'")
        )
    if project.ruff is not None:
        check = ["check", "--no-cache", "--output-format=concise", "."]
        found["lint"] = cycle([_item("lint", [project.ruff, *check], f"ruff {' '.join(check)}")])
    return found


def _item(tool: str, argv: list[str], command: str) -> WorkItem:
    return WorkItem(tool=tool, argv=argv, command=command)


def _endless(choices: Sequence[str], rng: random.Random, make: Callable[[str], WorkItem]) -> Iterator[WorkItem]:
    order = list(choices)
    rng.shuffle(order)
    return (make(choice) for choice in cycle(order))
