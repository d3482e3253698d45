"""Classes of tools: what a call is likely to take before anything was seen of its tool.

Covers names of tools and first command words, and published waits of coding agents (TraceLab's SWE tasks; waits on
people: recorded coding sessions). A name that is in no list is of class "other", with the broad prior.
"""

from __future__ import annotations

from itertools import pairwise
from math import exp, log

from agentkv.core.curve import EDGES_S, FACTOR

OTHER = "other"
PERSON = "person"

_NAMES = {
    "person": "person human user ask ask_user ask_human human_input request_input approval",
    "agent": "agent task subagent sub_agent delegate spawn_agent",
    "read": "read read_file view open_file cat head tail ls list_dir list_files stat wc file",
    "edit": "edit write edit_file write_file str_replace apply_patch multiedit create_file",
    "search": "grep rg glob find fd ag search_files",
    "git": "git",
    "test": "pytest tox nox jest vitest unittest ctest",
    "install": "pip pip3 npm pnpm yarn uv poetry apt apt-get conda",
    "shell": "bash sh shell zsh run run_command execute terminal",
    "web": "curl wget web web_fetch web_search fetch browser http",
    "build": "make cmake ninja cargo gcc g++ clang mvn gradle tsc docker go",
}
_CLASS = {name: label for label, names in _NAMES.items() for name in names.split()}

_MARGINALS = {  # P50, P90, P99 in seconds
    "person": (127.0, 1540.0, 6850.0),
    "agent": (62.0, 98.0, 192.0),
    "read": (0.03, 0.11, 0.4),
    "edit": (0.03, 0.07, 0.11),
    "search": (0.05, 0.13, 0.14),
    "git": (0.1, 0.17, 0.23),
    "test": (1.7, 9.6, 92.0),
    "install": (1.8, 6.8, 40.0),
    "shell": (0.6, 2.6, 34.0),
}
_BROAD_FROM_S = 0.05
_BROAD_TO_S = 400.0
_LINDY = 1 - 1 / FACTOR
"""The hazard of a bin under "remaining ~ elapsed": P(T > t) proportional to 1 / t."""
_STEEPEST = 3.0
"""Published waits of narrow tools are not believed to be narrower than this (log-logistic shape)."""


def class_of(tool: str, command: str) -> str:
    """The class of a tool call; the command says more than the tool that runs it."""
    word = command.partition(" ")[0]
    return _CLASS.get(word) or _CLASS.get(tool.lower(), OTHER)


def prior_of(label: str) -> tuple[float, ...]:
    """The hazards of the 46 bins before anything was seen.

    "other" and classes without published waits: log-uniform from 50 ms to 400 s with a median of 4.5 s, and whoever
    takes longer takes about as long again as it took. Others: log-logistic through the published P50, P90 and P99.
    """
    marginals = _MARGINALS.get(label)
    if marginals is None:
        return _BROAD
    survival = [_log_logistic(edge_s, *marginals) for edge_s in EDGES_S]
    return tuple(1 - after / before for before, after in pairwise(survival))


def _log_logistic(at_s: float, p50_s: float, p90_s: float, p99_s: float) -> float:
    """P(T > `at_s`), odds of having ended: 1 at P50, 9 at P90, 99 at P99, a power law between and beyond."""
    body = min(_STEEPEST, log(9) / log(p90_s / p50_s))
    tail = min(_STEEPEST, log(11) / log(p99_s / p90_s))
    log_odds = body * log(min(at_s, p90_s) / p50_s) + tail * log(max(at_s, p90_s) / p90_s)
    return 1 / (1 + exp(log_odds))


def _broad() -> tuple[float, ...]:
    survival = [min(1.0, max(0.0, log(_BROAD_TO_S / s) / log(_BROAD_TO_S / _BROAD_FROM_S))) for s in EDGES_S]
    return tuple(min(_LINDY, 1 - after / before) if before > 0 else _LINDY for before, after in pairwise(survival))


_BROAD = _broad()
